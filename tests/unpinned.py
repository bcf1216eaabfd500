"""The dependencies without upper bounds, one a line, for `make test-newest`."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for need in project["dependencies"] + project["optional-dependencies"]["dev"]:
    print(re.sub(r"(==|~=|<=?)[^,]*,?|\s", "", need).rstrip(","))
