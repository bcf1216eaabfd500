#!/usr/bin/env bash
# .whl/site.tar.xz of `gpu.sh`, for a lent GPU machine without registries: Python 3.12 with the packages of
# LEAVE. 44 MB, 3 minutes. PYTHON is one of 3.12 with pip; .whl must be ignored by git, and carried.
# `.whl/lume` and `.whl/tofu` are copies of LUME_DIR and TOFU_DIR.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3.12} made=$(mktemp -d)/site-packages
# There already, or nothing imports them, or only tests that no GPU changes.
LEAVE="absl-py adlfs aiobotocore aiohappyeyeballs aiohttp aiosignal alembic annotated-doc azure-.* babel backrefs
botocore brotli build certifi charset-normalizer cloudpickle colorama contourpy cryptography cycler docutils einops
fastmcp fla-core flash-linear-attention fonttools frozenlist gcsfs google-.* gradio.* groovy grpcio hf-xet
hf-transfer idna iniconfig joblib kernels keyring kiwisolver llvmlite lxml mako markdown.* markupsafe matplotlib mcp
mdurl mistral-common mkdocs.* model-signing mpmath msal.* multidict narwhals networkx nh3 numba numpy nvidia-.* oci
ocifs openai openapi-pydantic openenv-core optimum optuna pandas pathspec pillow pluggy portalocker propcache psutil
pyarrow pycountry pydub pygments pymdown-extensions pyparsing pyproject-hooks pytest python-dateutil python-pkcs11
pytz pyyaml ray requests rfc3161-client ruff s3fs sacrebleu scikit-learn scipy secretstorage securesystemslib
sentencepiece shellingham sigstore six sortedcontainers sqlalchemy sympy tensorboard.* threadpoolctl tiktoken torch
tqdm trackio triton twine urllib3 uvicorn uvloop watchfiles werkzeug wrapt xformers xllamacpp xxhash yarl"
pattern="^($(echo "$LEAVE" | tr '\n ' '||' | tr -s '|'))=="
grep -viE "$pattern|^#" constraints/3.12.txt > "${made%/*}/wanted.txt"
"$python" -m pip install -q --no-deps --no-compile --target "$made" -r "${made%/*}/wanted.txt" .
rm -rf "$made"/bin "$made"/axolotl_unlearn "$made"/wandb/bin
find "$made" -name 'libbitsandbytes_*' ! -name '*cpu*' ! -name '*cuda130*' -delete
find "$made"/faker/providers -mindepth 2 -type d -regex '.*/[a-z][a-z][a-z]?\(_[A-Z][A-Z]\)?' ! -path '*/en*' -prune -exec rm -r {} +
mkdir -p .whl
tar -C "${made%/*}" -cJf .whl/site.tar.xz site-packages
ls -l .whl/site.tar.xz
