from __future__ import annotations

import subprocess
import sys


def test_books_are_kept_without_torch() -> None:
    """Simulation runs the same managers where no torch is installed."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'transformers')))\n"
        "from onebudget.resources import KVCacheManager, KVCacheManagerV2, ResourceManager\n"
        "from onebudget.resources.kv import cross, division, disk_tier, dummies, store, tier\n"
        "from onebudget.devtools import kv_lives\n"
        "kv = KVCacheManager(store.CountedStore(8, 4), reuse=True)\n"
        "lives = kv_lives.Lives(KVCacheManager(kv_lives.WrittenStore(16, 4), reuse=True), seed=1)\n"
        "for _ in range(40): lives.start(); lives.step(); lives.cancel()\n"
        "lives.finish()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
