# How conf/carried/*.yaml are evaluated and shown: sourced by run.sh, in place of what its comparison does.
# shellcheck shell=bash disable=SC2034,SC2154

protocols=(valid test)
task=()
evaluate() { # evaluate NAME SPLIT, by every protocol of the model
  local found protocol flags
  [ ! -e "$out/$1/diverged" ] || return 0
  found=$(python "$tools/lm_state.py" protocols "$here/carried.yaml" "$1")
  mapfile -t found <<<"$found"
  for protocol in "${found[@]}"; do
    read -ra flags <<<"${protocol#*$'\t'}"
    score "$1" "$2" "${protocol%%$'\t'*}" "${flags[@]}"
  done
}
report() {
  run python "$tools/lm_state.py" csv "$out" "$here/carried.yaml" >"$out/carried/carried.csv"
  run python "$tools/lm_state.py" picture "$out/carried/carried.csv" "$here/carried.yaml" "$out/carried/carried.png"
  run python "$tools/lm_state.py" table "$out/carried/carried.csv" "$here/carried.yaml" >"$out/carried/table.unfinished"
  mv "$out/carried/table.unfinished" "$out/carried/table.md"
  cat "$out/carried/table.md"
  echo "The same is in $out/carried/table.md, its numbers in $out/carried/carried.csv, a picture in $out/carried/carried.png."
}
sample() { :; }
