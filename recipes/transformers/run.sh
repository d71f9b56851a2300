#!/usr/bin/env bash
# A small model with the shape of Qwen3.5 and random weights, in transformers, learns Python on a CPU: with transformers'
# own operators on padded batches, with ours on the same batches, and with ours on packed sequences. Minutes on 2 cores.
# The losses must be the same; the words a second, with one thread of CPU time, are not. --lora trains only adapters (peft).
# --bf16 computes in bfloat16 where PyTorch's autocast does; there losses differ by its rounding, too. --measure times the
# layer, a training step and a decoding step of a larger model instead, --measure xlstm those of xLSTM. --steps N,
# --threads N.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" transformers -- "$@"
run python "$here/qwen.py" "$@"
