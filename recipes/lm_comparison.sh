# Compares language models on one text; sourced by quickstart/ and peps/run.sh.
# The run.sh sets: here (its folder), root, data (empty: own_text), out, merges (BPE), models (names of conf/NAME.yaml),
# protocols ("SPLIT" or "SPLIT CONTEXT": the perplexities to compute), prompt, per_word (--per-word or empty, for the
# table), and the functions own_text OUT, which writes train.txt, valid.txt and test.txt, and show_sample, a filter.
# shellcheck shell=bash disable=SC2034,SC2154

# shellcheck source=recipes/lm_common.sh
. "$root/recipes/lm_common.sh"

lines='' prepared='' data_given='' # --lines; set by need_data and --data
tokens=256 # per sample, in training and in evaluation
task=(--task language_modeling --tokens-per-sample "$tokens" --sample-break-mode none --required-batch-size-multiple 1)

read_arguments() {
  stage=all
  case ${1:-} in
    prepare | train | eval | sample | all) stage=$1; shift ;;
    [!-]*) die "there is no stage $1: it is prepare, train, eval, sample or all." ;;
  esac
  extra=()
  while [ $# -gt 0 ]; do
    case $1 in
      --models)
        read_names "$@"
        models=$names
        shift $((taken + 1)) ;;
      --data | --out | --lines)
        [ -n "${2:-}" ] || die "$1 needs a value: a folder, for --lines a number."
        [ "$1" != --data ] || data_given=1
        [ "$1" != --lines ] || check_lines "$2"
        printf -v "${1#--}" %s "$2"
        shift 2 ;;
      --data=* | --out=* | --models=* | --lines=*) die "write ${1%%=*} and its value as two words." ;;
      --save-dir | --tokens-per-sample) die "$1 is set by the recipe (--out, and $tokens for all models): leave it out." ;;
      *) extra+=("$1"); shift ;;
    esac
  done
  # A name like -x would be taken for an option by what it is passed to.
  [[ $out = /* ]] || out=$PWD/$out
  [[ -z $data || $data = /* ]] || data=$PWD/$data
}

need_data() { # need_data HINT: for recipes without a text of their own; what is prepared needs its folder no more
  [ ! -d "$data" ] || return 0
  [ -z "$data_given" ] && [ -d "$out/data" ] || die "there is no folder $data: $1"
  prepared=1
}

prepare() {
  local work=$out/data.unfinished split source="$merges merges; ${data:-own text}"
  source+="${lines:+; $lines lines of valid and test}"
  [ ! -d "$data" ] || source+=" $(find "$data" -maxdepth 1 -name '*.txt*' -exec cksum {} + | sort | cksum)"
  if [ -d "$out/data" ]; then
    [ -n "$prepared" ] || check_same "$out/data/source.txt" "$source"
    return
  fi
  rm -rf "$work"
  mkdir -p "$work/text" "$work/bpe"
  if [ -n "$data" ]; then run python "$tools/lm_text.py" "$data" "$work/text"; else own_text "$work/text"; fi
  if [ -n "$lines" ]; then # a trial
    for split in valid test; do
      head -n "$lines" "$work/text/$split.txt" >"$work/first"
      mv "$work/first" "$work/text/$split.txt"
    done
  fi
  # The merges come from the training text alone.
  run subword-nmt learn-bpe -s "$merges" -i "$work/text/train.txt" -o "$work/bpe/codes"
  for split in train valid test; do
    run subword-nmt apply-bpe -c "$work/bpe/codes" -i "$work/text/$split.txt" -o "$work/bpe/$split.txt"
  done
  run_to "$work/preprocess.log" fairseq-preprocess --only-source --trainpref "$work/bpe/train.txt" \
    --validpref "$work/bpe/valid.txt" --testpref "$work/bpe/test.txt" --destdir "$work/bin" --workers 2 ||
    die "fairseq-preprocess failed: see $work/preprocess.log."
  echo "$source" >"$work/source.txt"
  mv "$work" "$out/data" # only now does it count
}

evaluate() { # evaluate NAME SPLIT [CONTEXT]
  local log="$out/$1/$2${3:+ with context $3}.ppl.log"
  [ ! -e "$out/$1/diverged" ] || return 0
  [ -e "$out/$1/trained" ] || die "$1 is not trained: run the stage train first."
  [ ! -e "$log" ] || return 0
  run_to "$log.unfinished" fairseq-eval-lm "$out/data/bin" --user-dir "$root/fairseq_fwp" --task language_modeling \
    --path "$out/$1/checkpoint_best.pt" --gen-subset "$2" --tokens-per-sample "$tokens" ${3:+--context-window "$3"} \
    --sample-break-mode none --batch-size 16 --log-format simple ||
    { tail -n 5 "$log.unfinished" >&2; die "the evaluation of $1 failed: see $log.unfinished."; }
  run python "$tools/lm_results.py" check "$log.unfinished" "$out/data/bpe/$2.txt"
  mv "$log.unfinished" "$log"
}

report() {
  local name trained=() logs=()
  for name in $models; do
    if [ -e "$out/$name/diverged" ]; then
      echo "$name is not in the table, it diverged: $(cat "$out/$name/diverged")."
    else
      trained+=("$name") logs+=("$name=$out/$name/train.log")
    fi
  done
  [ ${#trained[@]} -gt 0 ] || return 0
  run fwp-plot "${logs[@]}" --out "$out/curves.png"
  # shellcheck disable=SC2086
  run python "$tools/lm_results.py" table $per_word "$out" "${trained[@]}" >"$out/table.unfinished"
  mv "$out/table.unfinished" "$out/table.md"
  cat "$out/table.md"
  echo "The same is in $out/table.md, the curves of validation in $out/curves.png."
}

sample() { # from the first model
  local name=${models%% *}
  [ -e "$out/$name/trained" ] || die "$name is not trained: run the stage train first."
  # A text of one's own is continued from the first words of its test set.
  [ -z "$data" ] || prompt=$(grep -m 1 '[^[:space:]]' "$out/data/text/test.txt" | awk '{ print $1, $2, $3, $4 }')
  printf '%s\n' "$prompt" | run_to "$out/sample.log" fairseq-interactive "$out/data/bin" --user-dir "$root/fairseq_fwp" --task language_modeling \
    --path "$out/$name/checkpoint_best.pt" --bpe subword_nmt --bpe-codes "$out/data/bpe/codes" \
    --sampling --sampling-topp 0.9 --temperature 0.7 --beam 3 --nbest 3 --max-len-b 200 --seed 1 ||
    die "sampling failed: see $out/sample.log."
  grep '^D-' "$out/sample.log" | cut -f 3 | show_sample >"$out/sample.txt"
  echo "Three texts that $name wrote after \"$prompt\" (also in $out/sample.txt):"
  cat "$out/sample.txt"
}

compare() {
  local name protocol text=$out/data/bpe
  for name in $models; do
    [ -f "$here/conf/$name.yaml" ] && [ "${name##*/}" != common ] || die "there is no model $name: they are" \
      "$(cd "$here/conf" && find . -name '*.yaml' ! -name common.yaml | sed 's/^..//; s/.yaml$//' | sort | paste -sd ' ')."
  done
  # `train` prepares the data too, if that has not been done; `eval` and `sample` do not train.
  case $stage in prepare | train | all) prepare ;; esac
  [ -d "$out/data" ] || die "there is no $out/data: run the stage prepare first."
  case $stage in
    prepare) echo "The data is in $out/data."; next train --out "$out" --models "$models" ;;
    train | all) for name in $models; do train "$name" "$here/conf/$name.yaml"; done ;;
  esac
  [ "$stage" != train ] || next eval --out "$out" --models "$models"
  case $stage in
    eval | all)
      for name in $models; do
        # shellcheck disable=SC2086
        for protocol in "${protocols[@]}"; do evaluate "$name" $protocol; done
      done
      report ;;
  esac
  case $stage in sample | all) sample ;; esac
}
