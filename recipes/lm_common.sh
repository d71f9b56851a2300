# Trains and evaluates a language model, for every recipe that has one; sourced, after env.sh. Needs out, where OUT/data/bin
# is what fairseq-preprocess wrote; text, the folder of what it read; extra, the flags of the command line; and task, flags
# that say how a model reads the text, empty where its YAML does.
# shellcheck shell=bash disable=SC2154

tools=$root/recipes
export TQDM_MININTERVAL=5 # seconds; a log file would get thousands of progress bars

die() { echo "run.sh: $*" >&2; exit 1; }

# The names that follow a flag, in one argument or in several, up to the next flag: into `names`, and how many arguments
# into `taken`.
read_names() { # read_names FLAG ARGUMENT...
  local flag=$1
  shift
  names='' taken=0
  while [ $# -gt 0 ] && [[ $1 != -* ]]; do
    names+=${names:+ }$1 taken=$((taken + 1))
    shift
  done
  [ -n "$names" ] || die "$flag needs a value: one name or several."
}

find_conf() { # of --conf, a path or a name in this recipe's folder
  [ -f "$conf" ] || conf=$here/$conf
  [ -f "$conf" ] || die "give --conf conf/NAME.yaml: there are $(cd "$here/conf" && find . -name '*.yaml' ! -name common.yaml | sort | cut -c 3- | paste -sd ' ')."
}

check_lines() { # check_lines VALUE: of --lines
  [[ $1 =~ ^[1-9][0-9]*$ ]] || die "--lines must be a whole number of at least 1, got '$1'."
}

# What lies there was made from what this file says, numbers by their value (2e-5 is 0.00002); anything else needs a folder
# of its own.
check_same() { # check_same FILE TEXT
  [ "$(cat "$1")" != "$2" ] || return 0 # also of several lines, as a path may have
  printf '%s\n' "$(cat "$1")" "$2" | awk '
    NR == 1 { count = split($0, found) }
    NR == 2 { other = split($0, given) != count; for (i in found) if (found[i] != given[i]) other = 1 }
    END { exit NR != 2 || other }' || die "$(dirname "$1") was made with other settings (see $1): give another --out."
}

# label FLAGS...: they name a result; those that change no score are left out.
label() {
  local name=''
  while [ $# -gt 0 ]; do
    case $1 in
      --cpu | --no-progress-bar | --batch-size=* | --log-format=* | --log-interval=*) ;;
      --batch-size | --log-format | --log-interval) [ $# = 1 ] || shift ;;
      *) name+=" ${1#--}" ;;
    esac
    shift
  done
  name=${name//\//_}
  echo "${name# }"
}

next() { # next STAGE FLAGS...: what to do after this
  printf 'Next: bash%s\n' "$(printf ' %q' "$0" "$@")"
}

run_to() { # run_to LOG COMMAND...: as run, but what the command says goes to LOG
  printf '+%s\n' "$(printf ' %q' "${@:2}")" >&2
  "${@:2}" >"$1" 2>&1
}

train() { # train NAME CONF
  local flags settings where start=(fairseq-train)
  # $LAUNCH, if set, is what starts a program in several processes, such as torchrun or srun with their flags.
  if [ -n "${LAUNCH:-}" ]; then
    read -ra start <<<"$LAUNCH"
    start+=("$(command -v fairseq-train)")
  fi
  flags=$(python "$tools/flags.py" "$2")
  mapfile -t flags <<<"$flags"
  settings=$(printf '%q ' "${flags[@]}" "${extra[@]}")
  # fairseq goes on from a checkpoint_last.pt.
  [ ! -e "$out/$1/checkpoint_last.pt" ] && [ ! -e "$out/$1/diverged" ] ||
    check_same "$out/$1/settings.txt" "$settings"
  [ ! -e "$out/$1/diverged" ] || { echo "$1 diverged before: $(cat "$out/$1/diverged")."; return 0; }
  [ ! -e "$out/$1/trained" ] || { echo "$1 is trained already: $out/$1/checkpoint_best.pt, train.log."; return 0; }
  mkdir -p "$out/$1"
  echo "$settings" >"$out/$1/settings.txt"
  if run "${start[@]}" "$out/data/bin" --user-dir "$root/fairseq_fwp" "${task[@]}" "${flags[@]}" \
    --save-dir "$out/$1" --no-epoch-checkpoints --keep-interval-updates 1 --log-format json "${extra[@]}" 2>&1 |
    tee -a "$out/$1/train.log" | python "$tools/lm_progress.py" "$1"; then
    touch "$out/$1/trained"
    echo "$1 is trained: $out/$1/checkpoint_best.pt, train.log."
  elif where=$(python "$tools/lm_results.py" diverged "$out/$1/train.log"); then
    echo "$where" >"$out/$1/diverged" # a result: the other models go on
    echo "$1 diverged: $where."
  else
    die "the training of $1 failed: see $out/$1/train.log."
  fi
}

score() { # score NAME SPLIT LABEL FLAGS...: fwp-eval-lm, every token of the split, into OUT/NAME/SPLIT[ LABEL].json
  local result="$out/$1/$2${3:+ $3}.json"
  [ -e "$out/$1/trained" ] || die "$1 is not trained: run the stage train first."
  [ ! -e "$result" ] || { echo "$1 is evaluated already: $result"; return 0; }
  run fwp-eval-lm "$out/data/bin" --path "$out/$1/checkpoint_best.pt" --gen-subset "$2" --no-progress-bar \
    --json "$result.unfinished" "${@:4}" || die "the evaluation of $1 failed."
  run python "$tools/lm_results.py" check "$result.unfinished" "$text/$2.txt"
  mv "$result.unfinished" "$result"
  echo "The result is in $result"
}
