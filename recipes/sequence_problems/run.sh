#!/usr/bin/env bash
# State tracking (parity, S3) and recall (MQAR) on generated sequences. Trains every rule, and prints the share of
# right answers. About twenty minutes on 2 cores.
# --conf takes a file like conf/quick.yaml, which is the default; conf/modern.yaml has the whole layers of later models.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe problems -- "$@"
