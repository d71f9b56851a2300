#!/usr/bin/env bash
# The quick start's model without PyTorch: exports it to ONNX, in 32 and in 8 bits, writes text with both, and prints
# the time of a token and memory after more and more tokens, and perplexities on the test text. A minute, after the
# quick start (which runs first, if it has not). --out FOLDER: a new folder for the two graphs.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" onnx plots -- "$@"
out=$root/runs/onnx
if [ "${1:-}" = --out ] && [ $# -eq 2 ]; then out=$2
elif [ $# -gt 0 ]; then echo "run.sh: arguments must be --out FOLDER or none, got $*" >&2; exit 2; fi
trained=$root/runs/quickstart
[ -f "$trained/delta/checkpoint_best.pt" ] || bash "$root/recipes/quickstart/run.sh"
mkdir -p "$out"
for bits in 32 8; do
  quantize=(); [ $bits = 32 ] || quantize=(--quantize int8)
  if [ ! "$out/$bits/model.json" -nt "$trained/delta/checkpoint_best.pt" ]; then # none, or of an earlier model
    [ ! -f "$out/$bits/model.json" ] || rm -r "${out:?}/$bits"
    run fwp-export "$trained/data/bin" --path "$trained/delta/checkpoint_best.pt" --out "$out/$bits" \
      --bpe-codes "$trained/data/bpe/codes" ${quantize[@]+"${quantize[@]}"}
  fi
  run python "$here/generate.py" "$out/$bits" "$(cat "$trained/prompt.txt")" --beam 3
  run python "$here/generate.py" "$out/$bits" --measure
  run python "$here/generate.py" "$out/$bits" --score "$trained/data/text/test.txt"
done
