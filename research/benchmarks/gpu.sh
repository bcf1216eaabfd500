#!/usr/bin/env bash
# make bench-gpu: what a GPU can show, in order of worth, in MINUTES (9) in all.
#   tests   TESTS or every file, each in a process of its own, as many as there are cores
#   steps   steps and memory (gpu.py), FIGURES of it; started again it goes on
#   recipe  the paper's recipe through `axolotl train`, `merge-lora`, mergekit and `eval` (recipe_gpu.py)
# PARTS chooses among them. A machine without registries: .whl/site.tar.xz (gpu_site.sh) holds the packages that it
# lacks, and commands are written beside its Python; COMMIT names the commit where there is no git. Results go to OUT.
set -u
TESTS=${TESTS:-}
cd "$(dirname "$0")/../.."
out=${OUT:-research/benchmarks} ends=$((SECONDS + ${MINUTES:-9} * 60)) python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 AXOLOTL_DO_NOT_TRACK=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
[ -d .whl/lume ] && export LUME_DIR=$PWD/.whl/lume
if [ -f .whl/site.tar.xz ]; then
  [ -d /tmp/site-packages ] || tar -C /tmp -xf .whl/site.tar.xz || exit 1
  export PYTHONPATH=$PWD:/tmp/site-packages PYTORCH_NVML_BASED_CUDA_CHECK=1
  bin=$(dirname "$("$python" -c 'import sys; print(sys.executable)')")
  while read -r name module; do
    [ -e "$bin/$name" ] || printf '#!%s/python3\nimport runpy\nrunpy.run_module("%s", run_name="__main__")\n' \
      "$bin" "$module" > "$bin/$name" && chmod +x "$bin/$name"
  done <<< $'axolotl axolotl.cli.main\naxolotl-unlearn axolotl_unlearn.cli\nlm_eval lm_eval\nmergekit-yaml mergekit.scripts.run_yaml'
  export PATH=$bin:$PATH
fi
left() { echo $((ends - SECONDS > $1 ? $1 : ends - SECONDS)); }
echo "unpacked at $SECONDS s"
status=0
for part in ${PARTS:-tests steps recipe}; do
  [ "$(left 1)" -gt 0 ] || exit 1
  case $part in
    tests)
      files=$(for name in $TESTS; do find tests research/tests -name "test_$name.py"; done)
      # shellcheck disable=SC2086
      OMP_NUM_THREADS=1 timeout -k 5 "$(left "${TEST_SECONDS:-200}")" \
        "$python" tests/each_file.py $files -rf --tb=short -p no:cacheprovider > "$out/tests.log" 2>&1 || status=1
      grep -aE '^(test_|FAILED|[0-9]+ s,)' "$out/tests.log"
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
