#!/usr/bin/env bash
# Clark et al. 2022 (arXiv 2212.02475), Figure 2: which tokens a fast weight layer predicts better than its base model.
#   bash recipes/fwl/figure2.sh local|xl|wt103 FOLDER [FLAGS]
# As in the paper, the models learn from the first two thirds of the training text, and the last third is scored.
#   local, xl   the small models of run.sh: local attention, or Transformer-XL. FOLDER has train.txt and valid.txt: after
#               `bash recipes/fwl/run.sh prepare`, the PEPs are in runs/fwl/data/text.
#   wt103       the paper's model, conf/wt103/local.yaml. FOLDER has wiki.train.tokens and wiki.valid.tokens.
# FLAGS are for fairseq-train. The picture and its numbers are figure2.png and figure2.csv in runs/fwl_figure2/MODEL, or in
# OUT=FOLDER. The same command resumes.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
model=${1:-} text=${2:-}
suffix=txt prefix="" small=("$model/base" "$model/fwl")
case $model in
  local) reading=(--context-window 0) block=(--block 512) ;;
  xl) reading=(--carry-state) block=() ;;
  wt103) reading=(--context-window 0) block=(--block 4096) prefix=wiki. suffix=tokens ;;
  *) echo "figure2.sh: the first argument must be local, xl or wt103, got '$model'." >&2; exit 1 ;;
esac
for split in train valid; do
  if [ ! -f "$text/$prefix$split.$suffix" ]; then
    echo "figure2.sh: '$text' must have $prefix$split.$suffix." >&2; exit 1
  fi
done
shift 2
out=${OUT:-$root/runs/fwl_figure2/$model}
thirds=$out/thirds

if [ ! -d "$thirds" ]; then # whole, or not at all
  rm -rf "$thirds.part"
  mkdir -p "$thirds.part"
  lines=$(wc -l < "$text/${prefix}train.$suffix")
  head -n $((lines * 2 / 3)) "$text/${prefix}train.$suffix" > "$thirds.part/train.txt"
  tail -n +$((lines * 2 / 3 + 1)) "$text/${prefix}train.$suffix" > "$thirds.part/test.txt"
  cp "$text/${prefix}valid.$suffix" "$thirds.part/valid.txt"
  mv "$thirds.part" "$thirds"
fi

if [ "$model" = wt103 ]; then
  train=(bash "$root/recipes/wikitext103/run.sh" train --data "$thirds" --any-text --out "$out")
  run "${train[@]}" --conf "$here/conf/wt103/local_base.yaml" "$@"
  base=$out/local_base layer=$out/local
  run "${train[@]}" --conf "$here/conf/wt103/local.yaml" --finetune-from-model "$base/checkpoint_best.pt" "$@"
else
  run bash "$here/run.sh" train --data "$thirds" --out "$out" --models "${small[@]}" "$@"
  base=$out/$model/base layer=$out/$model/fwl
fi
for path in "$base" "$layer"; do
  if [ ! -f "$path/third.tsv" ]; then
    run fwp-eval-lm "$out/data/bin" --path "$path/checkpoint_best.pt" "${reading[@]}" --scores "$path/third.tsv" --no-progress-bar
  fi
done
run fwp-plot --gain "$base/third.tsv" "$layer/third.tsv" --dictionary "$out/data/bin/dict.txt" ${block[@]+"${block[@]}"} \
  --out "$out/figure2.png"
