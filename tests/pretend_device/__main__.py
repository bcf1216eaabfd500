"""Run a module where the accelerator is the pretended one.

python -m pretend_device axolotl.cli.main train config.yml --launcher python
"""

import runpy
import sys

from pretend_device import start

start()
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
