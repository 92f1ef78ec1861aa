#!/usr/bin/env python3
"""Tests the page of `zerorun dash` in headless Chromium.

    scripts/test_dashboard.py ZERORUN [--install] [--screenshots DIR]

Starts a small fine-tuning job with two ranks and --dashboard, and `zerorun dash` on its folder of runs and on planted records.
Checks that the page shows the curve of the running job growing, saves and stops on request, refuses to act without the token,
compares two runs, shows a rank that was killed, works after the job has ended, runs nothing that names, log lines, samples or
settings contain, and requests nothing from other hosts. Then it checks the views of a sweep and of the loads of a mixture's experts
(dashboard_views.py). --screenshots writes pictures of the page with made-up runs into a folder.

Needs Debian's packages chromium and chromium-driver, which --install installs if it runs as root; without them, the script prints
the reason and exits with 77.
"""
import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request

sys.dont_write_bytecode = True
from dashboard_browser import PLANTED, Browser, Failure, Server, check, check_quiet, series, steps_shown, until
from dashboard_views import make_loads, make_sweep, test_experts, test_sweep

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "tests/fixtures/finetune"


def record(folder, name, steps, *, loss, lr, ranks, extra=(), planted="", killed=None, total=None, offset=0):
    """Writes the record of a made-up run that has ended."""
    folder.mkdir(parents=True)
    begin, noise = 1769883300 + offset, random.Random(name)
    settings = {"optimizer": {"type": "AdamW", "params": {"lr": lr}}, "zero_optimization": {"stage": 3}, "train_batch_size": 32,
                f"planted{planted}" if planted else "seed": planted or 7, **dict(extra)}
    host = "node-1"
    (folder / "run.json").write_text(json.dumps({
        "format": 1, "name": name, "created": begin, "command": ["zerorun", "-n", str(ranks), "train_gpt.rs"], "directory": "/work",
        "machine": {"host": host, "processor": "AMD EPYC 9654", "simd": "avx512", "cores": 96, "memory_bytes": 768 << 30, "system": "Linux"},
        "versions": {"candle_zero": "0.1.0", "debug": False, "features": []}, "git": {"commit": "3f94b36c0b", "branch": "main"},
        "world_size": ranks, "total_steps": total or steps, "settings": {"model": "mini", "ctx": 256}, "configuration": settings}))
    rows = [{"session": 1, "from_step": 0, "time": begin}]
    for step in range(1, steps + 1):
        warm = min(1, step / (0.05 * steps))
        row = {"step": step, "time": begin + 0.4 * step, "loss": loss(step) + noise.gauss(0, 0.06) * loss(step) / 3,
               "lr": lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps)), "grad_norm": 0.6 + 2 * math.exp(-step / 80) + abs(noise.gauss(0, 0.12)),
               "tokens_per_s": 8192 / 0.4 * (1 + noise.gauss(0, 0.01)), "forward_ms": 110 + noise.gauss(0, 4), "backward_ms": 220 + noise.gauss(0, 7),
               "step_ms": 60 + noise.gauss(0, 2), "comm_ms": 31 + noise.gauss(0, 3), f"extra{planted}": step % 7}
        if step % 50 == 0:
            row["val_loss"] = loss(step) * 1.03 + 0.02
        rows.append(row)
    lines = lambda name, all: (folder / name).write_text("".join(json.dumps(line) + "\n" for line in all))
    lines("metrics.jsonl", rows)
    end = begin + 0.4 * steps
    outcome = [] if killed is not None else [{"event": "end", "step": steps, "outcome": "finished", "time": end}]
    lines("events.jsonl", [
        {"event": "start", "format": 1, "session": 1, "restart": 0, "pid": 4100, "host": host, "world_size": ranks, "step": 0, "time": begin},
        {"event": "checkpoint", "step": steps // 2, "path": f"/work/saved{planted}", "folder": "/work", "time": begin + 0.2 * steps},
        *([{"event": "error", "step": steps, "message": planted, "time": end}] if planted else []), *outcome])
    lines("samples.jsonl", [{"step": at, "time": begin + 0.4 * at, "prompt": "The rank " + planted, "text": text} for at, text in (
        (steps // 2, "of a share is the part of the bucket that" + planted), (steps, "gathers its shard from every other rank before the unit runs." + planted))])
    names = ["parameters", "gradients", "master weights", "moments", "persistent", "gathered", "buckets"]
    sizes = [22, 44, 44, 88, 6, 28, 24]
    memory_of = lambda rank: {kind: {"held": (size << 20) + (rank << 18), "peak": int(size * 1.3) << 20, "file": 0} for kind, size in zip(names, sizes)}
    (folder / "ranks.json").write_text(json.dumps({"step": steps, "time": end, "session": 1, "answers": ["stop", "save"], "ranks": [
        {"rank": rank, "host": f"node-{1 + rank // 4}{planted}", "pid": 4100 + rank, "rss_bytes": (410 + 7 * rank) << 20, "rss_peak_bytes": 540 << 20,
         "forward_ms": 108 + rank, "backward_ms": 221 - rank, "step_ms": 61, "comm_ms": 24 + 4 * (rank % 4), "disk_ms": 0,
         "memory": memory_of(rank)} for rank in range(ranks)]}))
    launch = [{"event": "start", "restart": 0, "ranks": ranks, "here": ranks, "time": begin + 1}]
    for rank in range(ranks):
        dead = rank == killed
        how = "was killed by SIGKILL (9)" if dead else "was stopped by zerorun after another rank or host had failed" if killed is not None else "ended with exit code 0"
        launch.append({"event": "rank", "rank": rank, "host": host, "outcome": "failed" if dead else "stopped" if killed is not None else "ended",
                       "how": how + planted, "time": end + 1})
    lines("launch.jsonl", launch)
    (folder / "log.txt").write_text("".join(
        f"2026-01-31 18:{15 + step // 150:02}:{step * 2 // 5 % 60:02} [rank 0] step {step}/{total or steps} loss {loss(step):.4f} lr {lr:.3e} 20480 tokens/s{planted}\n"
        for step in range(10, steps + 1, 10)))


def planted_records(runs):
    """Writes records in which every text tries to become part of the page."""
    curve = lambda bottom: lambda step: bottom + 4 * math.exp(-step / 150)
    record(runs / f"evil {PLANTED.replace('/', '∕')}", PLANTED, 60, loss=curve(1), lr=1e-3, ranks=2, planted=PLANTED)
    record(runs / "first-20260131-101500", "first", 3000, loss=curve(1.5), lr=1e-3, ranks=2)
    record(runs / "second-20260131-111500", "second", 400, loss=curve(1.2), lr=3e-3, ranks=2, offset=3600, extra=[("gradient_clipping", 1.0)])


def child_pids(pid):
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def test(zerorun, work, browser):
    runs = work / "runs"
    runs.mkdir()
    planted_records(runs)
    job = [zerorun, "finetune", FIXTURES / "models/llama", "-n", "2", "--data", FIXTURES / "smollm2/chats.jsonl", "--steps", "1000000",
           "--out", work / "adapter", "--save", work / "saved", "--run", "live", "--runs", runs, "--dashboard", "0"]
    with contextlib.ExitStack() as stack:
        training = Server(list(map(str, job)), cwd=work)
        stack.callback(training.stop)
        dash = Server([zerorun, "dash", str(runs), "--port", "0"], cwd=work)
        stack.callback(dash.stop)

        # A running job, on its own page.
        browser.size(1400, 1000)
        browser.open(training.link)
        until("the page shows the running job", lambda: browser.text("#title").startswith("live-") and steps_shown(browser) > 2)
        check("token" not in browser.run("return location.hash"), "the token stays in the address")
        first, before = series(browser, "Loss"), steps_shown(browser)
        until("its curve grows", lambda: training.drain() or (steps_shown(browser) > before + 2 and series(browser, "Loss") != first))
        browser.click("#runs tbody tr:nth-child(2) input")
        before = steps_shown(browser)
        until("it grows next to another run", lambda: training.drain() or steps_shown(browser) > before)
        lines = browser.text("#log pre").splitlines()
        check(len(lines) == len(set(lines)) > 2, f"lines of the log are shown twice: {lines}")
        browser.click("#runs tbody tr:nth-child(2) input")
        until("ranks report", lambda: browser.run("return document.querySelectorAll('#rankstates tbody tr').length") == 2)
        live = browser.text("#title")
        until("buttons are enabled", lambda: not browser.run("return document.getElementById('save').disabled || document.getElementById('stop').disabled"))
        browser.click("#save")
        events = lambda: [event["event"] for event in training.get(f"/api/run?id={live}")["events"]]
        until("a checkpoint is saved on request", lambda: training.drain() or "checkpoint" in events())
        check("request" in events(), "the request is recorded")
        print("a running job: its curve grows, and it saves on request")

        # Without the token.
        path = f"/api/request?id={live}&what=stop"
        for headers in ({}, {"Authorization": "Bearer " + "0" * len(dash.token)}, {"Authorization": f"Bearer {training.token}"}):
            check(dash.post(path, headers) == 403, f"a request with {headers or 'no token'} is refused")
        check(dash.post(path, {"Authorization": f"Bearer {dash.token}", "Host": "evil.example"}) == 403, "another host is refused")
        check(dash.post(path, {"Authorization": f"Bearer {dash.token}", "Origin": "http://evil.example"}) == 403, "another site is refused")
        check("request" not in events()[events().index("request") + 1:], "refused requests reach no program")
        browser.run("sessionStorage.clear()")
        browser.open(f"{dash.address}/#run={live}")
        until("a page without the token", lambda: browser.text("#title") == live and steps_shown(browser) > 0)
        check(browser.run("return document.getElementById('stop').disabled && document.getElementById('stop').title.includes('token')"),
              "buttons are disabled without the token")
        print("without the token, no request is accepted")

        # A killed rank, while the page is open.
        training.drain()
        ranks = child_pids(training.process.pid)
        reported = [rank["pid"] for rank in dash.get(f"/api/run?id={live}")["ranks"]["ranks"]]
        check(sorted(reported) == sorted(ranks), f"the reports name the processes {ranks}, not {reported}")
        os.kill(reported[1], signal.SIGKILL)
        until("the dead rank is shown", lambda: training.drain() or "dead: was killed by SIGKILL (9)" in browser.text("#rankstates tbody tr:nth-child(2)"))
        training.stop()
        until("the end of the job is shown", lambda: re.match("failed|killed", browser.text("#facts")))
        check("[rank 1]" in browser.text("#log pre") or "[rank 0]" in browser.text("#log pre"), "the log has lines of ranks")
        check(series(browser, "Loss"), "the curve stays after the job has ended")
        print("the rank that was killed is shown as dead, and the page works after the job")

        # The job again, from its checkpoint, until the page asks it to stop.
        again = Server([*map(str, job), "--resume", "--max_restarts", "3"], cwd=work)
        stack.callback(again.stop)
        browser.open(again.link)
        until("the resumed job", lambda: again.drain() or not browser.run("return document.getElementById('stop').disabled"))
        browser.click("#stop")
        until("the job stops", lambda: again.drain() or again.process.poll() is not None)
        again.drain()
        check(again.process.returncode == 0 and "stopped on request: step" in "".join(again.output), f"it ended with {again.process.returncode}")
        check(dash.get(f"/api/run?id={live}")["run"]["state"] == "stopped", "its record says that it was stopped")
        print("a job stops on request, and is not restarted")

        # Two runs in the same charts.
        browser.open(dash.link)
        until("a run is chosen at once", lambda: series(browser, "Loss"))
        browser.open(f"{dash.address}/#run=first-20260131-101500")
        until("an old run", lambda: browser.text("#title") == "first-20260131-101500" and steps_shown(browser) == 3000)
        browser.type("/second")
        until("the list is filtered", lambda: browser.run("return document.querySelectorAll('#runs tbody tr').length") == 1)
        browser.click("#runs tbody input")
        legend = "return [...document.querySelectorAll('figure')].find((figure) => figure.querySelector('h3').textContent === 'Loss')?.querySelectorAll('li').length"
        until("two curves in a chart", lambda: browser.run(legend) == 2)
        dashes = browser.run("return [...document.querySelectorAll('#charts figure:first-child svg[tabindex] path.curve')].map((path) => path.getAttribute('stroke-dasharray'))")
        check(len(set(dashes)) > 1, f"curves differ without colour: {dashes}")
        browser.run("document.getElementById('config').open = true; document.getElementById('different').click()")
        until("what differs", lambda: browser.run("return [...document.querySelectorAll('#config tbody tr td:first-child')].map((cell) => cell.textContent)")
              == ["≠ gradient_clipping", "≠ optimizer.params.lr"])
        browser.run("const slider = document.getElementById('smoothing'); slider.value = 0.9; slider.dispatchEvent(new Event('input', {bubbles: true}));"
                    "document.getElementById('logy').click()")
        until("smoothing draws both", lambda: browser.run("return document.querySelectorAll('#charts figure:first-child path.raw').length") == 2)
        browser.run("document.querySelector('#charts svg[tabindex]').focus()")
        browser.type("\ue012\ue012")
        until("the keyboard moves along a curve", lambda: "step" in browser.text("#charts figcaption"))
        print("two runs are compared")

        # Texts that try to become part of the page.
        evil = next(run["id"] for run in dash.get("/api/runs")["runs"] if run["id"].startswith("evil"))
        browser.open("about:blank")
        browser.open(f"{dash.address}/#run={urllib.request.quote(evil)}")
        until("the planted run", lambda: browser.text("#title") == evil and steps_shown(browser) == 60)
        browser.run("for (const panel of document.querySelectorAll('main > details')) panel.open = true")
        until("all its texts", lambda: all("onerror" in browser.text(f"#{panel}") for panel in ("others", "ranks", "log", "samples", "config", "events")))
        check(browser.run("return window.planted === undefined && document.querySelectorAll('img, script:not([src]), iframe, [onerror]').length === 0"),
              "a planted text became part of the page")
        print("planted texts remain texts")

        # A narrow and dark page.
        browser.size(400, 800)
        browser.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        until("the page fits 400 pixels", lambda: browser.run("return document.documentElement.scrollWidth") <= 400)
        check(browser.run("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)", "the page is dark if the system is")
        browser.command("Emulation.setEmulatedMedia", features=[])

        # The server ends; the page reports this and keeps its data.
        dash.stop()
        until("the page notices the end of the server", lambda: "no connection" in browser.text("#connection"))
        check(series(browser, "Loss"), "the curve stays without a server")
        check_quiet(browser)
        print("nothing was requested from other hosts")


def screenshots(zerorun, work, browser, pictures):
    runs = work / "runs"
    curve = lambda bottom, speed: lambda step: bottom + 3.9 * math.exp(-step / speed) + 0.9 * math.exp(-step / (5 * speed))
    record(runs / "mini-20260130-091200", "mini", 1500, loss=curve(2.1, 60), lr=1e-3, ranks=8)
    record(runs / "mini-warm-20260131-181500", "mini-warm", 1500, loss=curve(1.9, 75), lr=2e-3, ranks=8, offset=90000, extra=[("gradient_clipping", 1.0)])
    record(runs / "mini-wide-20260131-203000", "mini-wide", 620, loss=curve(1.8, 70), lr=2e-3, ranks=8, killed=5, total=1500, offset=98000)
    dash = Server([zerorun, "dash", "runs", "--port", "0"], cwd=work)
    pictures.mkdir(parents=True, exist_ok=True)
    try:
        for name, width, height, ids, script in (
            ("dash", 1400, 1000, ("mini-warm-20260131-181500", "mini-20260130-091200"), ""),
            ("dash-ranks", 1400, 1000, ("mini-wide-20260131-203000",), "document.getElementById('ranks').scrollIntoView()"),
            ("dash-narrow", 400, 900, ("mini-warm-20260131-181500",), "document.getElementById('main').scrollIntoView()"),
        ):
            browser.size(width, height)
            browser.open(f"{dash.link}&" + "&".join(f"run={run}" for run in ids))
            until("the page", lambda: browser.run("return document.querySelectorAll('#charts svg[tabindex] path.curve').length") >= 6 * len(ids))
            until("the ranks", lambda: browser.run("return document.querySelectorAll('#rankstates tbody tr').length") == 8)
            until("the list", lambda: browser.run("return document.querySelectorAll('#runs tbody tr').length") == 3)
            browser.run("const slider = document.getElementById('smoothing'); slider.value = 0.8; slider.dispatchEvent(new Event('input', {bubbles: true}))")
            until("smoothed curves", lambda: browser.run("return document.querySelectorAll('#charts path.raw').length") > 0)
            browser.run(script)
            browser.screenshot(pictures / f"{name}.png")
    finally:
        dash.stop()
    make_sweep(zerorun, work / "lr-sweep")
    record(work / "lr-sweep/runs/mixture-20260131-181500", "mixture", 600, loss=curve(1.7, 70), lr=1e-3, ranks=2)
    make_loads(work / "lr-sweep/runs/mixture-20260131-181500/experts.json", 600)
    dash = Server([zerorun, "dash", "lr-sweep", "--port", "0"], cwd=work)
    try:
        browser.size(1400, 1000)
        browser.open(dash.link)
        until("the trials", lambda: browser.run("return document.querySelectorAll('#trials tbody tr').length") == 24)
        browser.run("document.querySelector('#parallel svg[tabindex]').focus()")
        browser.screenshot(pictures / "dash-sweep.png")
        browser.size(1100, 480)
        until("the loads", lambda: browser.run("return document.querySelectorAll('#expertmap path.load').length") > 6)
        browser.run("document.getElementById('experts').scrollIntoView()")
        browser.screenshot(pictures / "dash-experts.png")
    finally:
        dash.stop()


def has_browser(installs):
    found = lambda: shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("google-chrome"))
    if not found() and installs and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium", "chromium-driver"]):
            subprocess.run(["apt-get", "-q", *command], stdout=subprocess.DEVNULL, check=False)
    return found()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zerorun", type=pathlib.Path)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--screenshots", type=pathlib.Path, metavar="DIR")
    arguments = parser.parse_args()
    if not has_browser(arguments.install):
        print("skipped: there is no Chromium; apt-get install chromium chromium-driver (scripts/test_dashboard.py)")
        return 77
    zerorun = str(arguments.zerorun.resolve())
    with tempfile.TemporaryDirectory(prefix="candle-zero-dashboard-") as folder:
        work = pathlib.Path(folder)
        browser = Browser(work)
        try:
            if arguments.screenshots:
                screenshots(zerorun, work, browser, arguments.screenshots)
            else:
                test(zerorun, work, browser)
                test_sweep(zerorun, work, browser)
                test_experts(zerorun, work, browser)
        except Failure as failure:
            print(f"failed: {failure}", file=sys.stderr)
            with contextlib.suppress(Exception):
                browser.read_logs()
                print("\n".join(browser.console), file=sys.stderr)
                print(browser.run("return document.body.innerText")[:3000], file=sys.stderr)
            return 1
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
