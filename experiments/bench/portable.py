"""The unit and federation tests as other machines would run them: other instruction sets, one thread and two.

    python experiments/bench/portable.py [--only avx2] [pytest arguments]

torch picks its kernels by ATEN_CPU_CAPABILITY and oneDNN by ONEDNN_MAX_CPU_ISA, so that one processor can stand for
older ones. Ends with a line a setting, and with exit code 1 if a test failed under one of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

SETTINGS = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "FEDSTILL_TEST_THREADS": "1"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "FEDSTILL_TEST_THREADS": "1"},
    "two threads": {"FEDSTILL_TEST_THREADS": "2", "OMP_NUM_THREADS": "2"},
}


def main() -> int:
    """Run them one after the other; what pytest said last of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SETTINGS))
    options, rest = parser.parse_known_args()
    ends = {}
    for name, settings in SETTINGS.items():
        if options.only not in (None, name):
            continue
        workers = "1" if settings["FEDSTILL_TEST_THREADS"] == "2" else "2"
        command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "--dist", "loadfile", *rest]
        command += [] if any(part.startswith("tests") for part in rest) else ["tests/unit", "tests/federation"]
        began = time.monotonic()
        print(f"--- {name}: {' '.join(f'{key}={value}' for key, value in settings.items())}", flush=True)
        done = subprocess.run(command, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout[-4000:] if done.returncode else done.stdout.splitlines()[-1], flush=True)
        ends[name] = (done.returncode, done.stdout.splitlines()[-1], time.monotonic() - began)
    for name, (code, last, seconds) in ends.items():
        print(f"{name:12} {'passed' if code == 0 else 'FAILED'} in {seconds / 60:.1f} min: {last}")
    return max((code for code, _, _ in ends.values()), default=0)


if __name__ == "__main__":
    sys.exit(main())
