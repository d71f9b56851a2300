# Prepares parallel text, trains and scores translation models, for every recipe that has them; sourced, after env.sh, by
# multi30k/ and wmt14_en_de/run.sh, which set here, root, data (a folder, or empty: download), out, merges (BPE), kind (what
# data holds, if that can be chosen), beam and generate (flags of fairseq-generate), and the function corpus FOLDER OUT, which
# writes OUT/tok/{train,valid,test}.{en,de}, tokenised (or OUT/bpe/..., which has BPE already), and OUT/text/{valid,test}.de,
# untokenised, where there is such text.
# shellcheck shell=bash disable=SC2034,SC2154

# shellcheck source=recipes/lm_common.sh
. "$root/recipes/lm_common.sh"

task=() # the YAMLs name it
words=() # flags of fairseq-preprocess
source=en
target=de

# Flags that all stages have; what is left goes to fairseq-train, or in eval to fairseq-generate.
read_flags() { # read_flags 'OWN FLAGS' ARGUMENT...
  local own=$1
  shift
  extra=()
  while [ $# -gt 0 ]; do
    if [ "$1" = --models ] && [[ " $own " = *" --models "* ]]; then
      read_names "$@"
      models=$names
      shift $((taken + 1))
      continue
    fi
    case " $own --data --out " in
      *" ${1%%=*} "*)
        [ "${1%%=*}" = "$1" ] || die "write ${1%%=*} and its value as two words."
        [ -n "${2:-}" ] || die "$1 needs a value."
        printf -v "${1#--}" %s "$2"
        shift 2
        continue ;;
    esac
    [ "${1%%=*}" != --save-dir ] || die "--save-dir is set by the recipe (--out): leave it out."
    extra+=("$1")
    shift
  done
  # A name like -x would be taken for an option by what it is passed to.
  [[ $out = /* ]] || out=$PWD/$out
  [[ -z $data || $data = /* ]] || data=$PWD/$data
  # With or without a slash at the end, it is the same folder.
  [ ! -d "$data" ] || data=$(cd -- "$data" && pwd)
}

prepare() {
  local work=$out/data.unfinished split language what="$merges merges;${kind:+ $kind;} ${data:-downloaded}"
  if [ -d "$out/data" ]; then
    [ -z "$data" ] || check_same "$out/data/source.txt" "$what"
    return
  fi
  [ -z "$data" ] || [ -d "$data" ] || die "there is no folder $data."
  rm -rf "$work"
  mkdir -p "$work"
  corpus "$data" "$work"
  if [ ! -d "$work/bpe" ]; then
    mkdir "$work/bpe"
    # One vocabulary for both languages; the merges come from the training text alone.
    cat "$work/tok/train.$source" "$work/tok/train.$target" >"$work/both"
    run_to "$work/bpe/learn.log" subword-nmt learn-bpe -s "$merges" -i "$work/both" -o "$work/bpe/codes" ||
      die "learning BPE failed: see $work/bpe/learn.log."
    rm "$work/both"
    for split in train valid test; do
      for language in $source $target; do
        run subword-nmt apply-bpe -c "$work/bpe/codes" --num-workers "$(nproc)" \
          -i "$work/tok/$split.$language" -o "$work/bpe/$split.$language"
      done
    done
  fi
  run_to "$work/preprocess.log" fairseq-preprocess --source-lang $source --target-lang $target --joined-dictionary \
    --trainpref "$work/bpe/train" --validpref "$work/bpe/valid" --testpref "$work/bpe/test" --destdir "$work/bin" \
    --workers "$(nproc)" "${words[@]}" || die "fairseq-preprocess failed: see $work/preprocess.log."
  # Scores are of words: BPE out again.
  mkdir -p "$work/tok"
  for split in valid test; do
    sed -E 's/@@( |$)//g' "$work/bpe/$split.$target" >"$work/tok/$split.$target"
  done
  rm -f "$work"/{tok,bpe}/train.{en,de}
  echo "$what" >"$work/source.txt"
  mv "$work" "$out/data" # only now does it count
}

check_test() { # before any work: --test goes with eval, and its files are there
  local language
  [ -n "$test" ] || return 0
  [ "$stage" = eval ] || die "--test PREFIX goes with eval."
  for language in $source $target; do
    [ -f "$test.$language" ] || [ -f "$test.$language.gz" ] ||
      die "--test: there is neither $test.$language nor $test.$language.gz."
  done
}

# A test set of one's own, raw text in PREFIX.en and PREFIX.de, into OUT/tests/NAME; translate takes that for a SPLIT.
own_test() { # own_test PREFIX NAME
  local work=$out/tests/$2.unfinished codes=$out/data/bpe/codes language sum
  [ -e "$codes" ] || die "--test needs the BPE codes of the training, and $out/data was made from text with BPE already."
  if ! run python "$tools/mt_text.py" tokenize "$work/tok/test" $source $target "$1" ||
    ! run python "$tools/mt_text.py" copy "$work/text/test" $source $target "$1"; then
    rm -rf "$work"
    exit 1
  fi
  sum=$(cat "$work"/text/test.* | cksum)
  if [ -e "$out/tests/$2" ]; then
    rm -r "$work"
    [ "$sum" = "$(cat "$out/tests/$2/sum")" ] || die "$out/tests/$2 has other text than $1: rename the files of one."
    return
  fi
  for language in $source $target; do
    mkdir -p "$work/bpe"
    run subword-nmt apply-bpe -c "$codes" -i "$work/tok/test.$language" -o "$work/bpe/test.$language"
  done
  run_to "$work/preprocess.log" fairseq-preprocess --source-lang $source --target-lang $target --destdir "$work/bin" \
    --srcdict "$out/data/bin/dict.$source.txt" --tgtdict "$out/data/bin/dict.$target.txt" --testpref "$work/bpe/test" ||
    die "fairseq-preprocess failed: see $work/preprocess.log."
  echo "$sum" >"$work/sum"
  mv "$work" "$out/tests/$2" # only now does it count
}

translate() { # translate NAME SPLIT CHECKPOINT LABEL: into OUT/NAME/SPLIT[ LABEL].json, unless it is there
  local raw=() result="$out/$1/$2${4:+ $4}" settings="${beam[*]}${generate[*]:+ ${generate[*]}}" from=$out/data split=$2
  [[ $2 != own_* ]] || from=$out/tests/$2 split=test
  [ -e "$out/$1/trained" ] || die "$1 is not trained: run the stage train first."
  # Scores of other flags, but that of the device, give way.
  settings=${settings// --cpu/}
  if [ -e "$result.json" ] && [ "$(cat "$result.flags" 2>/dev/null)" = "$settings" ]; then
    echo "$1 is evaluated already: $result.json"
    return
  fi
  rm -f "$result.json"
  [ ! -e "$from/text/$split.$target" ] || raw=(--raw "$from/text/$split.$target")
  run_to "$result.log" fairseq-generate "$from/bin" --user-dir "$root/fairseq_fwp" --task translation \
    --source-lang $source --target-lang $target --path "$3" --gen-subset "$split" --post-process subword_nmt \
    --max-tokens 4000 "${beam[@]}" "${generate[@]}" ||
    { tail -n 5 "$result.log" >&2; die "the translation with $1 failed: see $result.log."; }
  run python "$tools/mt_scores.py" score "$result.log" --tokenized "$from/tok/$split.$target" \
    "${raw[@]}" --language $target --out "$result.unfinished"
  echo "$settings" >"$result.flags"
  mv "$result.unfinished" "$result.json"
  echo "The result is in $result.json"
}
