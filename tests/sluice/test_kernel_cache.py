"""An edited kernel takes every compiled function with it; anything else leaves them alone."""

import os

from sluice.kernel_cache import drop_stale


def lay(root, name, text, at):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def test_an_edited_kernel_drops_what_was_compiled_before(tmp_path):
    lay(tmp_path, "policies/a.py", "@njit\ndef f(): ...", 100)
    lay(tmp_path, "predictors/b.py", "from policies.a import f  # njit", 100)
    old = lay(tmp_path, "predictors/__pycache__/b.g-1.py311.nbi", "x", 150)
    new = lay(tmp_path, "policies/__pycache__/a.f-1.py311.1.nbc", "x", 250)
    assert drop_stale(tmp_path) == 0
    lay(tmp_path, "policies/a.py", "@njit\ndef f(): return 2", 200)
    assert drop_stale(tmp_path) == 1
    assert not old.exists()
    assert new.exists()


def test_other_files_do_not_count(tmp_path):
    lay(tmp_path, "policies/a.py", "@njit\ndef f(): ...", 100)
    kept = lay(tmp_path, "policies/__pycache__/a.f-1.py311.nbi", "x", 150)
    lay(tmp_path, "policies/plain.py", "x = 1", 200)
    assert drop_stale(tmp_path) == 0
    assert kept.exists()
