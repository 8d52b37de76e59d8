"""mkpack in a process of its own against a FakeHub: the real client reads its environment when it is imported.

One process serves many calls; kill() ends it in the middle of one, as a power cut would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from server import FakeHub

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_publisher"
REPO = "someone/tiny-moe"

# Waits of the client between its own retries are cut short; nothing else of it is changed.
_SCRIPT = """
import json, sys, time
from pathlib import Path
pause = time.sleep
time.sleep = lambda seconds: pause(min(seconds, 0.001))
import mkpack
from huggingface_hub import constants
from mkpack import pull, push, repo
from mkpack.errors import UserError

offline = constants.HF_HUB_OFFLINE

def do_push(path, name, **options):
    done = push.push(path, name, progress=False, **options)
    return {"commit": done.commit, "plan": json.loads(done.plan.to_json()), "notes": list(done.plan.notes)}

def do_plan(path, name, **options):
    return json.loads(push.plan(path, name, **options).to_json())

def do_pull(reference, **options):
    found = pull.pull(reference, progress=False, **options)
    with found.open() as artifact:
        held = {name: len(artifact.read(name, verify=False)) for name in artifact.held}
        damaged = artifact.verify(artifact.held)
    return {"commit": found.commit, "target": found.target, "folder": str(found.folder), "held": held,
            "damaged": damaged, "files": [f.path for f in found.files]}

def do_run(reference, **options):
    with mkpack.load(reference, **options) as model:
        return {"text": "".join(model.generate("Hi")), "target": model.target}

calls = {"push": do_push, "plan": do_plan, "pull": do_pull, "run": do_run}
for line in sys.stdin:
    asked = json.loads(line)
    repo.PART = asked.get("part") or repo.PART
    constants.HF_HUB_CACHE = asked.get("cache") or constants.HF_HUB_CACHE
    constants.HF_HUB_OFFLINE = asked["offline"] or offline
    if asked["call"] in ("push", "plan"):
        asked["args"][0] = Path(asked["args"][0])
    if "bench" in asked["options"]:
        asked["options"]["bench"] = [Path(p) for p in asked["options"]["bench"]]
    try:
        answer = calls[asked["call"]](*asked["args"], **asked["options"])
    except UserError as e:
        answer = {"error": str(e)}
    print(json.dumps(answer), flush=True)
"""


class Client:
    """client.push(path, repo, ...) and so on: what the call returned, or {"error": text}. Every call of one Client
    runs with the same cache; `env` changes the environment of the process that is started next. cache, offline: as if
    HF_HUB_CACHE and HF_HUB_OFFLINE had been set, without a new process."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self._hub, self.home = hub, home
        self.env: dict[str, str] = {"HF_TOKEN": TOKEN}
        self.part: int | None = None
        self.cache: Path | None = None
        self.offline = False
        self._process: subprocess.Popen[str] | None = None
        hub.tokens.add(TOKEN)

    def environment(self) -> dict[str, str]:
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()
        }
        settings = {
            "HF_HOME": str(self.home / "hf"), "HF_ENDPOINT": self._hub.url,
            "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(self.home / "config"),
        }  # fmt: skip
        return inherited | settings | self.env

    def begin(self, call: str, *args: Any, **options: Any) -> subprocess.Popen[str]:
        """Starts a call without waiting for its answer."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=open(self.home / "stderr", "a"), text=True, env=self.environment(),
            )  # fmt: skip
        asked: dict[str, Any] = {"call": call, "args": [str(a) for a in args], "options": options}
        asked |= {"part": self.part, "cache": self.cache and str(self.cache), "offline": self.offline}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._process

    def _call(self, call: str, *args: Any, **options: Any) -> dict[str, Any]:
        process = self.begin(call, *args, **options)
        assert process.stdout
        line = process.stdout.readline()
        assert line, (self.home / "stderr").read_text()
        return json.loads(line)

    def push(self, path: Path, repo: str, **options: Any) -> dict[str, Any]:
        return self._call("push", path, repo, **options)

    def plan(self, path: Path, repo: str, **options: Any) -> dict[str, Any]:
        return self._call("plan", path, repo, **options)

    def pull(self, reference: str, **options: Any) -> dict[str, Any]:
        return self._call("pull", reference, **options)

    def run(self, reference: str, **options: Any) -> dict[str, Any]:
        return self._call("run", reference, **options)

    def kill(self) -> None:
        """SIGKILL; the next call starts a new process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                assert stream
                stream.close()
        self._process = None

    def said(self) -> str:
        """All that its processes wrote to standard error."""
        return (self.home / "stderr").read_text()


def error(found: dict[str, Any]) -> str:
    assert "error" in found, found
    return found["error"]


def commit(found: dict[str, Any]) -> str:
    assert "commit" in found, found
    return found["commit"]
