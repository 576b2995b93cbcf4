"""Every test talks to a Hub on 127.0.0.1 and keeps its caches in a temporary folder."""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopback_hub import LoopbackHub

# huggingface_hub, transformers and datasets read these once, at import.
assert "huggingface_hub" not in sys.modules, "conftest.py must set HF_ENDPOINT before huggingface_hub is imported"
HUB = LoopbackHub().start()
HF_HOME = Path(tempfile.mkdtemp(prefix="eagle3-tests-"))
atexit.register(shutil.rmtree, HF_HOME, ignore_errors=True)
for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.pop(name, None)
os.environ |= {
    "HF_ENDPOINT": HUB.url,
    "HF_HOME": str(HF_HOME),
    "HF_MODULES_CACHE": str(HF_HOME / "modules"),
    "HF_TOKEN": "hf_test",
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))


# Started in the background of a shell, SIGINT is ignored, and so it would be in the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def hub(monkeypatch):
    """The loopback Hub, empty and without faults, and an empty client cache."""
    import huggingface_hub.utils._http as client

    # huggingface_hub 2.4 retries a lost connection five times and sleeps 23 s in between.
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=lambda seconds: None))
    HUB.reset()
    shutil.rmtree(HF_HOME / "hub", ignore_errors=True)
    yield HUB
    HUB.reset()


@pytest.fixture
def run_clean(tmp_path):
    """Run a snippet as a stranger: a new process with empty caches and without eagle3_llama. Returns stdout."""

    def run(code, *args, env=None, timeout=300):
        home = tempfile.mkdtemp(prefix="stranger-", dir=tmp_path)
        environment = {**os.environ, "HF_HOME": home, "HF_MODULES_CACHE": f"{home}/modules", **(env or {})}
        environment.pop("PYTHONPATH", None)
        code = 'import sys\nsys.modules["eagle3_llama"] = None\n' + textwrap.dedent(code)
        command = [sys.executable, "-c", code, *map(str, args)]
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            pytest.fail(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
        return done.stdout

    return run
