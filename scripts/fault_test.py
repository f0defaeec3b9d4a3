"""Kills, damages and starves small runs, and checks that what comes out is bit for bit what an undisturbed run gives.

    python scripts/fault_test.py                      # 5 kills of each command, 20 bits of each kind of file
    python scripts/fault_test.py --kills=1 --flips=1  # the short form

Kills (SIGKILL) come at random moments of preparing, training, evaluating and sweeping, and
the same command is given again. A flipped bit must be told of in one line, or change
nothing. A full disk, a read-only directory, one that is moved away and a second start must
end in one line, and the same command must come to the same end when they are over. Prints
what was survived; exits with 1 where parameters or rows differ, or a line is missing.
The full and the read-only disk are file systems of their own, which only root can mount.
"""

import argparse
import functools
import os
import pathlib
import sys
import tempfile
import time

# A clone works without being installed: python scripts/fault_test.py has only scripts/ on its path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from faults.disks import can_mount
from faults.starts import STARTS, second_start
from faults.test import FILES, KINDS, FaultTest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of preparing, of training, evaluating and sweeping")
    parser.add_argument("--flips", type=int, default=20, help="of each kind of file")
    parser.add_argument("--kinds", default=",".join(FILES), help="of the files whose bits are flipped")
    parser.add_argument("--starts", default=",".join(STARTS), help="of which a second one is made beside the first")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the bits")
    arguments = parser.parse_args()
    kinds = list(filter(None, arguments.kinds.split(",")))
    if unknown := set(kinds) - FILES.keys():
        parser.error(f"--kinds={','.join(unknown)}: there are {', '.join(FILES)}")
    if unknown := set(filter(None, arguments.starts.split(","))) - set(STARTS):
        parser.error(f"--starts={','.join(unknown)}: there are {', '.join(STARTS)}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="alibi-faults-") as name:
        test = FaultTest(pathlib.Path(name), arguments.seed)
        stages = [functools.partial(test.kills, arguments.kills, kind) for kind in KINDS if arguments.kills]
        stages += [functools.partial(test.flips, arguments.flips, kind) for kind in kinds]
        starts = filter(None, arguments.starts.split(","))
        stages += [functools.partial(second_start, test, which) for which in starts]
        stages.append(test.moved_away)
        if can_mount(test.folder / "probe"):
            stages += [test.full_disk, test.read_only]
        else:
            print("left out, since only root can mount them: a full disk, a read-only directory")
        for stage in stages:
            before, complaints = test.survived.copy(), len(test.complaints)
            stage()
            for what, times in sorted(test.survived.items() - before.items()):
                print(f"{what}: {times}", flush=True)
            for complaint in test.complaints[complaints:]:
                print(f"wrong: {complaint}", flush=True)
    print(f"differences: {test.differences}, other mistakes: {len(test.complaints) - test.differences}")
    print(f"took {time.monotonic() - start:.0f} s")
    return 1 if test.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
