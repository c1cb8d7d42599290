import subprocess

import pytest


@pytest.fixture
def tiny_tmpfs(tmp_path):
    """Mounts a tmpfs of a given size; skips only where mounting is not allowed."""
    mounted = []

    def mount(size):
        folder = tmp_path / f"tmpfs-{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no right to mount a tmpfs: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
