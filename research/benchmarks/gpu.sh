#!/usr/bin/env bash
# make bench-gpu: what a GPU can measure, in order of worth, in MINUTES (9); started again it goes on.
#   1. the recipe through `axolotl train`, EPOCHS (2; the whole has 5), if Axolotl is there
#   2. steps, memory, precisions (gpu.py)
# EPOCHS, STEPS, ONLY ("evaluation merge"): less of it.
# A machine without registries: wheels of what it lacks lie in .whl/ (`pip download --no-deps -d .whl
# peft bitsandbytes ...`), and COMMIT names the commit where there is no git. Results go to OUT.
set -u
cd "$(dirname "$0")/../.."
out=${OUT:-research/benchmarks} ends=$((SECONDS + ${MINUTES:-9} * 60)) python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
[ -d shared/lume ] && export LUME_DIR=$PWD/shared/lume
if compgen -G ".whl/*.whl" > /dev/null; then
  site=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" .whl/*.whl || exit 1
  export PYTHONPATH=$site:$PYTHONPATH
fi
status=0
if "$python" -c "import axolotl" 2> /dev/null; then # two thirds of the time at most: the steps come too
  timeout -s INT -k 10 $(((ends - SECONDS) * 2 / 3)) "$python" -m research.benchmarks.recipe_gpu \
    --epochs "${EPOCHS:-2}" ${STEPS:+--steps $STEPS --no-merge} --out "$out" "$@" || { status=1; echo "the recipe did not end" >&2; }
fi
left=$((ends - SECONDS - 45)) # a figure that has begun ends
[ $left -gt 0 ] || exit 1
"$python" -m research.benchmarks.gpu --steps 8 --minutes $((left / 60)).$((left % 60 / 6)) ${ONLY:+--only $ONLY} \
  --out "$out" "$@" || status=1
exit $status
