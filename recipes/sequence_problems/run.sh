#!/usr/bin/env bash
# State tracking (parity, S3) and recall (MQAR) on generated sequences: trains each rule and draws the right answers.
# What is done is not done again; an interrupted grid goes on with the same command. --conf: conf/quick.yaml (the default:
# twenty minutes on 2 cores) or one of your own.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe problems -- "$@"
