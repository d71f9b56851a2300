#!/usr/bin/env bash
# Fast weight layers (Clark et al. 2022) beside dynamic evaluation, on two small models of the Python Enhancement Proposals:
# local attention, read in blocks, and Transformer-XL, read in segments. About two hours on a core; nothing is done twice,
# but speeds, "speed *.json", are worth measuring again on a quiet machine once all else is there: remove them, and eval.
#
#   bash recipes/fwl/run.sh [prepare|train|eval|all] [--data FOLDER] [--out FOLDER] [--models NAME ...]
#                                                                    [flags for fairseq-train]
#
# --data FOLDER   holds train, valid and test as .txt or .txt.gz (data/peps); what is prepared needs it no more
# --lines N       evaluates on the first N lines of valid and test alone, with few statistics: all of it can be tried in
#                 minutes by --lines 50 --max-update 20 --out runs/fwl_trial
# --out FOLDER    where everything goes (runs/fwl)
# --models ...    which of conf/{local,xl}/*.yaml: base is trained first, and the others go on from it with a layer on top
#
# The paper's models, on WikiText-103, are conf/wt103/*.yaml for recipes/wikitext103/run.sh; each says how.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=recipes/env.sh
. "$here/../env.sh" plots -- "$@"
# shellcheck source=recipes/lm_comparison.sh
. "$here/../lm_comparison.sh"

data=$root/data/peps
out=$root/runs/fwl
merges=8000
known="local/base local/slow local/fwl local/bias xl/base xl/slow xl/fwl xl/carried xl/bias"
models=$known
protocols=(valid test)
task=()
# For each base, rates of dynamic evaluation, and step sizes of fast weights at test time: the best on the validation text is
# reported. "Test-time only" takes steps of U and a alone, see RESULTS.md; all are down the gradients of single tokens.
declare -A sgd=([local]="0.05 0.1" [xl]="0.02 0.05") rms=([local]="6e-4 1e-3" [xl]="2e-4 3e-4")
declare -A epsilon=([local]=1e-3 [xl]=3e-4) steps=([local]="0.001 0.002" [xl]="0.0006 0.001")
declare -A bias_steps=([local]="0.03" [xl]="0.01") carried_steps=([xl]="0.001 0.0015")
test_time="{'fwl_fast_weights':'first','fwl_divide_gradients_by':1.0,'fwl_decay':0.8,'fwl_step_size':@}"
test_carried="{'fwl_fast_weights':'first','fwl_gradients_at':'carried','fwl_divide_gradients_by':1.0,'fwl_decay':0.97,'fwl_step_size':@}"
test_bias="{'fwl_fast_weights':'softmax-bias','fwl_divide_gradients_by':1.0,'fwl_decay':0.9,'fwl_step_size':@}"
statistics=400 # windows of the training text for RMS
speed_lines=400 # of the test text, to measure speeds on

# Reads as in training: blocks, or segments with the state carried on.
reading() {
  case $1 in
    local/*) echo "--context-window 0" ;;
    xl/*) echo "--carry-state" ;;
  esac
}

# add_layer BASE: its model with a layer on top, which changes nothing yet.
add_layer() {
  [ ! -e "$out/$1/start.pt" ] || return 0
  [ -e "$out/$1/base/trained" ] || die "the layer is put on $1/base, which is not trained: name it before, in --models."
  run fwp-add-layer "$out/data/bin" --path "$out/$1/base/checkpoint_best.pt" --out "$out/$1/start.pt"
}

# ways NAME: how a model is evaluated, a line of "LABEL|VALUES|FLAGS" each, where @ stands for one of the values.
ways() {
  local base=${1%/*} rms_flags="--dynamic rms --dynamic-epsilon ${epsilon[${1%/*}]} --dynamic-statistics $statistics"
  echo "plain||"
  case $1 in
    */base)
      echo "sgd|${sgd[$base]}|--dynamic sgd --dynamic-lr @"
      echo "rms|${rms[$base]}|$rms_flags --dynamic-lr @" ;;
    */slow)
      echo "rms|${rms[$base]}|$rms_flags --dynamic-lr @"
      echo "test-time|${steps[$base]}|--model-overrides $test_time"
      [ -z "${carried_steps[$base]:-}" ] || echo "carried|${carried_steps[$base]}|--model-overrides $test_carried"
      echo "test-bias|${bias_steps[$base]}|--model-overrides $test_bias" ;;
  esac
}

# for_ways NAME FUNCTION: FUNCTION NAME LABEL VALUES FLAGS for each.
for_ways() {
  local line found label values flags
  mapfile -t found < <(ways "$1")
  for line in "${found[@]}"; do
    IFS='|' read -r label values flags <<<"$line"
    "$2" "$1" "$label" "$values" "$flags"
  done
}

# evaluate_by NAME SPLIT LABEL VALUE FLAGS: with the log-probability of each token beside the result.
evaluate_by() {
  local flags label="$3${4:+ $4}"
  read -ra flags <<<"$(reading "$1") ${5//@/$4}"
  score "$1" "$2" "$label" "${flags[@]}" --scores "$out/$1/$2 $label.tsv"
}

# Each value on the validation text, and the best of them on the test text.
evaluate_way() { # evaluate_way NAME LABEL VALUES FLAGS
  local value values
  read -ra values <<<"$3"
  for value in "${values[@]:-}"; do evaluate_by "$1" valid "$2" "$value" "$4"; done
  evaluate_by "$1" test "$2" "$(python "$here/rows.py" best "$out/$1" "$2")" "$4"
}

# The first lines of the test text, for speeds; the statistics of RMS come from a training text beside it.
prepare_speed() {
  [ ! -d "$out/speed" ] || return 0
  rm -rf "$out/speed.unfinished"
  mkdir "$out/speed.unfinished"
  head -n "$speed_lines" "$text/test.txt" >"$out/speed.unfinished/text"
  run_to "$out/speed.unfinished/preprocess.log" fairseq-preprocess --only-source --srcdict "$out/data/bin/dict.txt" \
    --testpref "$out/speed.unfinished/text" --destdir "$out/speed.unfinished"
  cp "$out"/data/bin/train.{bin,idx} "$out/speed.unfinished"
  mv "$out/speed.unfinished" "$out/speed"
}

measure_way() { # measure_way NAME LABEL VALUES FLAGS
  local flags result="$out/$1/speed $2.json"
  [ ! -e "$result" ] || return 0
  read -ra flags <<<"$(reading "$1") ${4//@/$(python "$here/rows.py" best "$out/$1" "$2")}"
  run fwp-eval-lm "$out/speed" --path "$out/$1/checkpoint_best.pt" --no-progress-bar --json "$result" "${flags[@]}"
}

analyse() { # analyse NAME PICTURE FLAGS...: where the layer helps
  local before="$out/${1%/*}/base/test plain.tsv" after="$out/$1/test plain.tsv"
  [ -e "$before" ] && [ -e "$after" ] || return 0
  run python "$here/analysis.py" "$before" "$after" "$out/data/bin/dict.txt" "$out/$2.png" "${@:3}"
}

read_arguments "$@"
for name in $models; do
  [[ " $known " = *" $name "* ]] || die "there is no model $name: they are ${known// /, }."
done
need_data "see recipes/peps/run.sh for what it holds, and give it with --data."
[ -z "$lines" ] || statistics=4 speed_lines=$lines
text=$out/data/bpe
case $stage in
  sample) die "there is no stage sample here: it is prepare, train, eval or all." ;;
  prepare | train | all) prepare ;;
esac
[ "$stage" != prepare ] || { echo "The data is in $out/data."; next train --out "$out" --models "$models"; }
flags_for_all=("${extra[@]}")
case $stage in
  train | all)
    for name in $models; do
      extra=("${flags_for_all[@]}")
      if [ "${name#*/}" != base ]; then
        add_layer "${name%/*}"
        extra+=(--finetune-from-model "$out/${name%/*}/start.pt")
      fi
      train "$name" "$here/conf/$name.yaml"
    done ;;
esac
[ "$stage" != train ] || next eval --out "$out" --models "$models"
case $stage in
  eval | all)
    for name in $models; do for_ways "$name" evaluate_way; done
    prepare_speed
    for name in $models; do for_ways "$name" measure_way; done
    run python "$here/rows.py" csv "$out" >"$out/rows.csv"
    run python "$here/rows.py" table "$out/rows.csv" | tee "$out/table.md"
    echo "The same is in $out/table.md, its numbers in $out/rows.csv."
    analyse local/fwl local --title "FWLs on local attention" --block 512
    analyse xl/fwl xl --title "FWLs on Transformer-XL"
    analyse xl/carried xl_carried --title "FWLs on Transformer-XL, gradients at carried weights" ;;
esac
