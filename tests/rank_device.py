"""``axolotl train CONFIG`` as one of several processes, each on a pretended device of its own."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from pretend_device import group

    index = group.join()
    import torch
    from rank import do_cli  # which leaves CUDA alone

    path, sys.argv = sys.argv[1], ["axolotl"]
    do_cli(config=path)
    peaks = [torch.pretend.max_memory_allocated(place) for place in (0, 1)]
    assert peaks[index] > 10_000 and not peaks[1 - index], peaks
