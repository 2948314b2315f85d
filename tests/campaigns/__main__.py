"""Run campaigns by name, and record how they ended.

    python -m tests.campaigns                       list them
    python -m tests.campaigns fuzz_bodies isolation run some, with their usual options
    python -m tests.campaigns all                   run all of them: about an hour
    python -m tests.campaigns.attacks --help        one campaign with options of its own

Each writes its own report; this program writes one row for each into `campaigns.md` in the folder of this machine's
results. It exits with 1 if a campaign failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks import this_machine

ROOT = Path(__file__).parents[2]
REPORT = this_machine.results_folder() / "campaigns.md"
HEAD = """# Campaigns

`python -m tests.campaigns NAME…` on {machine}. The newest run of each.

| campaign | result | minutes | commit | date |
|---|---|---:|---|---|
"""


@dataclass(frozen=True)
class Campaign:
    """One campaign: the arguments of `python` that run it, and what it shows."""

    command: tuple[str, ...]
    shows: str


def _module(name: str, *options: str) -> tuple[str, ...]:
    return ("-m", f"tests.campaigns.{name}", *options)


CAMPAIGNS = {
    "attacks": Campaign(_module("attacks"), "a client with one valid key cannot hold up another tenant"),
    "chat_templates": Campaign(_module("chat_templates"), "what 70 published chat templates write is parsed whole"),
    "cluster_faults": Campaign(
        _module("cluster_faults", "--minutes", "15"),
        "servers, router and Redis fail: no wrong token",
    ),
    "combinations": Campaign(_module("combinations"), "random options together: answers equal the same alone"),
    "disk_faults": Campaign(_module("disk_faults", "--cycles", "500"), "a damaged disk store gives no wrong token"),
    "fuzz_bodies": Campaign(_module("fuzz_bodies", "--seed", "1", "--count", "2000"), "random bodies cause no 5xx"),
    "fuzz_faults": Campaign(
        _module("fuzz_bodies", "--seed", "2", "--count", "2000", "--faults", "0.004"),
        "steps that raise, and a small cache: others' answers are the same",
    ),
    "isolation": Campaign(_module("isolation"), "no tenant learns what another has sent"),
    "redis_faults": Campaign(_module("redis_faults", "--cycles", "500"), "a faulty Redis gives no wrong token"),
    "soak": Campaign(("-m", "pytest", "-m", "soak", "-q"), "state machines with injected faults, for minutes"),
    "worst_bodies": Campaign(_module("worst_bodies"), "the worst permitted fields cost a bounded time"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    # Without `choices`: argparse of Python 3.11 also looks for the empty list of names among them.
    parser.add_argument("name", nargs="*", help="campaigns to run, or all; none: list them")
    names: list[str] = parser.parse_args().name
    if unknown := set(names) - {*CAMPAIGNS, "all"}:
        parser.error(f"no campaign is called {min(unknown)!r}; there are {', '.join(CAMPAIGNS)}")
    if not names:
        for name, campaign in CAMPAIGNS.items():
            print(f"{name:<14} {campaign.shows}")
        return 0
    codes = [run(name) for name in (CAMPAIGNS if "all" in names else names)]
    return int(any(codes))


def run(name: str) -> int:
    """Run one campaign, and record its row; returns its exit code."""
    print(f"{name}: {CAMPAIGNS[name].shows}", flush=True)
    began = time.monotonic()
    code = subprocess.run([sys.executable, *CAMPAIGNS[name].command], cwd=ROOT, check=False).returncode
    minutes = (time.monotonic() - began) / 60
    result = f"failed ({code})" if code else "passed"
    record(name, f"| {name} | {result} | {minutes:.1f} | {commit()} | {date.today()} |")
    return code


def commit() -> str:
    """Return the short hash of the commit that is checked out, with a plus sign if files differ from it."""
    describe = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def record(name: str, row: str) -> None:
    """Replace the campaign's row in the report, or add it."""
    rows = REPORT.read_text().splitlines() if REPORT.exists() else []
    others = [
        line for line in rows if line.startswith("| ") and line.split()[1] in CAMPAIGNS and line.split()[1] != name
    ]
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(HEAD.format(machine=this_machine.name()) + "\n".join(sorted([*others, row])) + "\n")


if __name__ == "__main__":
    sys.exit(main())
