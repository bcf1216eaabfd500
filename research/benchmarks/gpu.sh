#!/usr/bin/env bash
# make bench-gpu: what a GPU can show, in order of worth, in MINUTES (9) in all.
#   tests   every file in TESTS, each in a process of its own, as many as there are cores
#   steps   steps and memory (gpu.py), FIGURES of it; started again it goes on
#   recipe  the paper's recipe through `axolotl train`, `merge-lora`, mergekit and `eval` (recipe_gpu.py)
# PARTS chooses among them. A machine without registries: .whl/site.tar.xz holds a folder `site-packages` of the
# packages that it lacks; COMMIT names the commit where there is no git. Results go to OUT.
set -u
cd "$(dirname "$0")/../.."
out=${OUT:-research/benchmarks} ends=$((SECONDS + ${MINUTES:-9} * 60)) python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 AXOLOTL_DO_NOT_TRACK=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
[ -d .whl/lume ] && export LUME_DIR=$PWD/.whl/lume
if [ -f .whl/site.tar.xz ]; then
  [ -d /tmp/site-packages ] || tar -C /tmp -xf .whl/site.tar.xz || exit 1
  export PYTHONPATH=$PWD:/tmp/site-packages
fi
left() { echo $((ends - SECONDS > $1 ? $1 : ends - SECONDS)); }
echo "unpacked at $SECONDS s"
status=0
for part in ${PARTS:-tests steps recipe}; do
  [ "$(left 1)" -gt 0 ] || exit 1
  case $part in
    tests)
      "$python" -c "import axolotl.core.builders, axolotl.cli.train, lm_eval.evaluator" || exit 1
      echo "imported at $SECONDS s"
      most=$(left "${TEST_SECONDS:-200}") bin=$(mktemp -d)
      printf '#!/bin/sh\nexec %s -m axolotl.cli.main "$@"\n' "$python" > "$bin/axolotl" && chmod +x "$bin/axolotl"
      printf '%s\0' ${TESTS:-every_method train_axolotl training_teacher training_level engine_hidden} |
        PATH=$bin:$PATH xargs -0 -P "$(nproc --all)" -I{} sh -c "log=\$(mktemp); timeout -s INT -k 5 $most \
          $python -m pytest -q -rf --tb=short -p no:cacheprovider tests/test_{}.py > \$log 2>&1; \
          echo {} \$? \$(tail -n 1 \$log); { echo '== {}'; tail -c 60000 \$log; } >> '$out/tests.log'"
      ;;
    steps)
      "$python" -m research.benchmarks.gpu --steps 8 --minutes $(($(left 999) / 60)).$(($(left 999) % 60 / 6)) \
        ${FIGURES:+--only $FIGURES} --out "$out" || status=1
      ;;
    recipe)
      "$python" -m research.benchmarks.recipe_gpu --epochs "${EPOCHS:-5}" --pairs "${PAIRS:-8}" \
        --minutes $(($(left 999) / 60)) --out "$out" || status=1
      ;;
  esac
  echo "$part ended at $SECONDS s"
done
exit $status
