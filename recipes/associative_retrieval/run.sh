#!/usr/bin/env bash
# Synthetic associative retrieval (Schlag, Irie & Schmidhuber 2021, Sec. 6.1): trains a grid and draws Figures 2 to 5.
# What is done is not done again; an interrupted grid goes on with the same command.
#
#   bash recipes/associative_retrieval/run.sh [plan|train|report|all] [--conf YAML]... [--out FOLDER] [--workers N]
#
# --conf YAML     conf/quick.yaml (the default: half an hour on 2 cores), conf/slow.yaml (nearer to the knees and more keys),
#                 conf/capacity.yaml (every rule with every map), conf/full.yaml or one of your own; may be given again
# --out FOLDER    where everything goes (runs/associative_retrieval)
# --workers N     points at once (the number of cores)
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=recipes/env.sh
. "$here/../env.sh" plots -- "$@"

die() { echo "run.sh: $*" >&2; exit 1; }

stage='' confs=() out=$root/runs/associative_retrieval workers=()
while [ $# -gt 0 ]; do
  case $1 in
    plan | train | report | all)
      [ -z "$stage" ] || die "there are two stages, $stage and $1: name one."
      stage=$1
      shift
      continue ;;
    --conf | --out | --workers) [ -n "${2:-}" ] || die "$1 needs a value." ;;
    -*) die "there is no $1: it is --conf, --out or --workers." ;;
    *) die "there is no stage $1: it is plan, train, report or all." ;;
  esac
  case $1 in
    --conf) confs+=("$2") ;;
    --out) out=$2 ;;
    --workers) workers=(--workers "$2") ;;
  esac
  shift 2
done
stage=${stage:-all}
[ ${#confs[@]} -gt 0 ] || confs=("$here/conf/quick.yaml")
for conf in "${confs[@]}"; do [ -e "$conf" ] || die "there is no $conf."; done

if [ "$stage" = plan ]; then run python "$here/retrieval_grid.py" "${confs[@]}" --out "$out" --plan "${workers[@]}"; fi
case $stage in train | all) run python "$here/retrieval_grid.py" "${confs[@]}" --out "$out" "${workers[@]}" ;; esac
case $stage in report | all) run python "$here/retrieval_report.py" "${confs[@]}" --out "$out" ;; esac
