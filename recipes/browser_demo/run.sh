#!/usr/bin/env bash
# A static page on which the quick start's model writes text in the browser, token by token in constant memory.
# Exports the model (recipes/onnx), adds onnxruntime-web with npm, and serves the page on this machine only.
# The folder runs/browser_demo can be copied to any web server. --port N: another port than 8000.
# --check: open the page in a headless Chromium instead, and compare its tokens with those of recipes/onnx/generate.py.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" onnx plots -- "$@"
port=8000 check=
while [ $# -gt 0 ]; do
  case $1 in
    --port) port=${2:?"run.sh: --port needs a number"}; shift 2 ;;
    --check) check=1; shift ;;
    *) echo "run.sh: arguments must be --port N or --check, got $1" >&2; exit 2 ;;
  esac
done
command -v npm > /dev/null || { echo "run.sh: npm must be installed, to get onnxruntime-web" >&2; exit 1; }
[ "$root/runs/onnx/32/model.json" -nt "$root/runs/quickstart/delta/checkpoint_best.pt" ] || bash "$root/recipes/onnx/run.sh"
site=$root/runs/browser_demo
mkdir -p "$site/model" "$site/ort"
cp "$here/index.html" "$site"
cp "$root"/runs/onnx/32/* "$site/model"
if [ ! -f "$site/ort/ort.wasm.min.mjs" ]; then
  made=$(mktemp -d)
  run npm install --silent --ignore-scripts --prefix "$made" onnxruntime-web@1.30
  cp "$made"/node_modules/onnxruntime-web/dist/{ort-wasm-simd-threaded.mjs,ort-wasm-simd-threaded.wasm,ort.wasm.min.mjs} "$site/ort"
  rm -r "$made"
fi
if [ -z "$check" ]; then
  echo "open http://localhost:$port (control + C ends it)"
  run python -m http.server "$port" --bind 127.0.0.1 --directory "$site"
else
  run python "$here/check.py" "$site"
fi
