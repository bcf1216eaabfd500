# axolotl-unlearn on Axolotl's own image, whose environment has torch and CUDA.
#
#   docker build -t axolotl-unlearn .
#   docker run --gpus all -v "$PWD:/workspace/job" -w /workspace/job axolotl-unlearn axolotl train unlearn.yml
ARG AXOLOTL=axolotlai/axolotl:main-latest
FROM ${AXOLOTL}
COPY . /opt/axolotl-unlearn
RUN pip install --no-cache-dir /opt/axolotl-unlearn
