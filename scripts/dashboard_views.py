"""Two parts of test_dashboard.py, the page about a sweep and the loads of the experts of a mixture, and made-up runs for its
pictures."""
import contextlib
import json
import math
import pathlib
import random
import subprocess
import urllib.parse

from dashboard_browser import PATIENCE, PLANTED, Server, check, check_quiet, series, steps_shown, until

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "tests/fixtures"
# The keys of the WebDriver protocol.
ENTER, RIGHT, DOWN = "\ue007", "\ue014", "\ue015"
# The name of a folder cannot contain a slash.
EVIL = f"evil {PLANTED.replace('/', '∕')}"


def write_chats(path):
    chat = lambda a, b: {"messages": [{"role": "user", "content": f"{a} and {b}?"}, {"role": "assistant", "content": str(a + b)}]}
    path.write_text("".join(json.dumps(chat(i * 7 % 10, i * 3 % 10)) + "\n" for i in range(60)))
    return path


def write_lines(path, rows):
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))


def plant_sweep(folder):
    """Writes a sweep in which every text tries to become part of the page, and whose journal has a damaged line."""
    folder.mkdir(parents=True)
    definition = {"command": ["finetune", PLANTED], "metric": PLANTED, "steps": 4, "trials": 3,
                  "parameters": {f"--{PLANTED}": [PLANTED, f"{PLANTED} 2"], "x": {"log_uniform": [1e-6, 1]}}}
    (folder / "sweep.json").write_text(json.dumps({"format": 1, "definition": definition, "directory": "/work", "configuration": None}))
    events = [{"event": "begin", "parallel": 1}]
    for trial, end in ((1, {"value": 0.5}), (2, {"error": PLANTED})):
        events += [{"event": "start", "trial": trial, "from": 0, "to": 4}, {"event": "end", "trial": trial, "to": 4, **end}, {"event": "take", "trial": trial}]
    write_lines(folder / "journal.jsonl", [*events, {"event": PLANTED}, {"event": "start", "trial": 3, "from": 0, "to": 4}])


def is_harmless(browser):
    return browser.run("return window.planted === undefined && document.querySelectorAll('img, script:not([src]), iframe, [onerror]').length === 0")


def table(browser):
    """Returns the rows of the table of trials: the number, the state, whether the trial is the best, and the text of the metric."""
    return browser.run("""return [...document.querySelectorAll('#trials tbody tr')].map((row) =>
        [parseInt(row.cells[0].textContent), row.dataset.state, row.cells[0].textContent.includes('best'), row.cells[3].textContent])""")


def test_sweep(zerorun, work, browser):
    sweeps = work / "sweeps"
    plant_sweep(sweeps / EVIL)
    command = [zerorun, "sweep", "--metric", "loss", "--steps", "4", "--trials", "6", "--scheduler", "asha", "--min_steps", "1", "--eta", "2",
               "--parallel", "1", "--param", "--lr=log_uniform:1e-5,1e-2", "--param", "--batch=choice:2,4", "--out", sweeps / "lr", "--",
               "finetune", FIXTURES / "finetune/models/llama", "--data", write_chats(work / "sweep.jsonl"), "--ctx", "48", "--cache", work / "cache"]
    with contextlib.ExitStack() as stack:
        dash = Server([zerorun, "dash", str(sweeps), "--port", "0"], cwd=work)
        stack.callback(dash.stop)
        log = stack.enter_context((work / "sweep.log").open("w"))
        sweep = subprocess.Popen(list(map(str, command)), cwd=work, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(sweep.wait)
        stack.callback(sweep.terminate)
        text = lambda: (work / "sweep.log").read_text()
        until("the sweep begins", lambda: (sweeps / "lr/journal.jsonl").exists() or check(sweep.poll() is None, text()))
        browser.size(1400, 1000)
        browser.open(f"{dash.link}&sweep=lr")
        until("a trial that is running", lambda: any(state == "running" for _, state, _, _ in table(browser)) or check(sweep.poll() is None, text()))
        check(sweep.wait(timeout=PATIENCE) == 0, text())
        shown = json.loads(subprocess.run([zerorun, "sweep", "show", sweeps / "lr", "--json"], capture_output=True, check=True).stdout)
        expected = sorted((trial["trial"], trial["state"], trial["trial"] == shown["best"]) for trial in shown["trials"])
        until("the end of the sweep", lambda: sorted(map(tuple, (row[:3] for row in table(browser)))) == expected)
        check(table(browser)[0][2], "the best trial is first")
        print("a sweep: its trials are shown while it is running")

        # The picture.
        axes = browser.run("return [...document.querySelectorAll('#parallel .axisname')].map((name) => name.querySelector('title').textContent)")
        check(axes == ["--batch", "--lr", "loss"], f"the axes are {axes}")
        notes = browser.text("#parallel svg[tabindex]")
        check("logarithmic" in notes and "choice" in notes and "1e-4" in notes, f"the scales are {notes}")
        found = browser.run("""return [...document.querySelectorAll('#parallel path[data-trial]')].map((line) =>
            [parseInt(line.dataset.trial), line.dataset.state, line.getAttribute('stroke-dasharray'), parseFloat(getComputedStyle(line).strokeWidth)])""")
        thick = [trial for trial, _, _, width in found if width > 3]
        check(len(found) == 6 and thick == [shown["best"]], f"the best trial is thick: {found}")
        dashes = {(state, dash) for _, state, dash, _ in found}
        check(len({state for state, _ in dashes}) == len({dash for _, dash in dashes}) == len(dashes) > 1, f"states differ without colour: {dashes}")
        check(series(browser, "Best loss so far, by steps trained in all trials"), "the curve of the best value")
        browser.run("document.querySelector('#parallel svg[tabindex]').focus()")
        browser.type(DOWN)
        until("the keyboard chooses the best trial", lambda: browser.text("#parallel figcaption").startswith(f"trial {shown['best']}, complete, step 4: loss "))
        browser.type(ENTER)
        run_of = lambda trial: f"lr/trial-{trial:04}-"
        until("its run is shown", lambda: browser.text("#title").startswith(run_of(shown["best"])) and steps_shown(browser) == 4)
        last = shown["trials"][-1]["trial"] if shown["trials"][-1]["trial"] != shown["best"] else 1
        browser.click(f"#trials [data-opens='{last}']")
        until("a trial's run is shown after a click", lambda: browser.text("#title").startswith(run_of(last)) and series(browser, "Loss"))
        check(run_of(last) in urllib.parse.unquote(browser.run("return location.hash")), "the address has the run")
        print("a sweep: parallel coordinates, and the runs of trials")

        # A sweep whose texts try to become part of the page, and whose journal is damaged.
        browser.run("const select = document.querySelector('#sweeps select'); select.value = arguments[0]; select.dispatchEvent(new Event('change', {bubbles: true}))", EVIL)
        until("the planted sweep", lambda: browser.text("#sweepname") == EVIL and len(table(browser)) == 3)
        problem = browser.text("#sweepproblem")
        check("journal.jsonl: line 8 is damaged" in problem, f"the damaged line is named: {problem}")
        states = sorted((number, state) for number, state, _, _ in table(browser))
        check(states == [(1, "complete"), (2, "failed"), (3, "running")], f"the other lines are shown: {states}")
        check(browser.text("#trials").count("onerror") >= 5 and "onerror" in browser.text("#parallel"), "planted texts are shown")
        check("unknown" in browser.text("#trials"), "unknown values are named")
        check(is_harmless(browser), "a planted text became part of the page")
        (sweeps / EVIL / "sweep.json").write_text("{")
        until("a damaged definition is named", lambda: "sweep.json is damaged" in browser.text("#sweepproblem"))
        check(browser.run("return document.querySelectorAll('#runs tbody tr').length") == 6, "the runs are still listed")
        browser.size(400, 800)
        until("the page fits 400 pixels", lambda: browser.run("return document.documentElement.scrollWidth") <= 400)
        browser.size(1400, 1000)
        check_quiet(browser)
        print("a sweep: planted texts remain texts, and damage is named")

        # The folder of a single sweep.
        single = Server([zerorun, "dash", str(sweeps / "lr"), "--port", "0"], cwd=work)
        stack.callback(single.stop)
        browser.open(single.link)
        until("the only sweep", lambda: browser.text("#sweepname") == "lr" and len(table(browser)) == 6 and browser.text("#title").startswith("trial-"))
        check(browser.run("return document.getElementById('sweeps').hidden"), "there is no choice between sweeps")
        check_quiet(browser)


def plant_loads(runs):
    """Writes records of mixtures: one with an unused expert, and one whose loads are damaged."""
    for name, loads in (("planted", {"step": 3, "time": 1769883300, "session": 1, "blocks": [{"block": 0, "choices": [5, 0, 3]}, {"block": 2, "choices": [1, 1, 2]}]}),
                        ("damaged", {"step": PLANTED})):
        folder = runs / f"{name}-20260131-101500"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"format": 1, "name": name, "created": 1769883300, "world_size": 1}))
        write_lines(folder / "metrics.jsonl", [{"step": step, "time": 1769883300 + step, "loss": 1 / step} for step in (1, 2, 3)])
        (folder / "experts.json").write_text(json.dumps(loads))


def test_experts(zerorun, work, browser):
    runs = work / "mixtures"
    plant_loads(runs)
    job = [zerorun, "finetune", FIXTURES / "moe/models/mixtral", "-n", "2", "--data", write_chats(work / "mixture.jsonl"), "--steps", "1000000",
           "--batch", "4", "--ctx", "48", "--lora", "r=2,targets=q_proj", "--cache", work / "cache", "--out", work / "mixture", "--save", work / "mixture-saved", "--run", "mixture",
           "--runs", runs, "--dashboard", "0"]
    with contextlib.ExitStack() as stack:
        training = Server(list(map(str, job)), cwd=work)
        stack.callback(training.stop)
        dash = Server([zerorun, "dash", str(runs), "--port", "0"], cwd=work)
        stack.callback(dash.stop)
        browser.open(training.link)
        step = lambda: browser.run("return parseInt(/After step ([\\d,]+)/.exec(document.querySelector('#experts').textContent)?.[1].replaceAll(',', '') ?? 0)")
        until("the loads of a running mixture", lambda: training.drain() or (browser.text("#title").startswith("mixture-") and step() > 0))
        first, live = step(), browser.text("#title")
        until("newer loads arrive", lambda: training.drain() or step() > first)
        # The table and the map agree with the record.
        training.stop()
        until("the end of the run", lambda: dash.get(f"/api/run?id={live}")["run"]["state"] != "running")
        browser.open(f"{dash.address}/#run={live}")
        recorded = dash.get(f"/api/run?id={live}")
        blocks, steps = recorded["experts"]["blocks"], recorded["run"]["steps"]
        until("the newest loads", lambda: step() == recorded["experts"]["step"])
        check(recorded["experts"]["step"] == steps, f"the loads belong to the last step {steps}, not to {recorded['experts']['step']}")
        sums = {sum(block["choices"]) for block in blocks}
        check(len(blocks) > 1 and {len(block["choices"]) for block in blocks} == {4} and len(sums) == 1 and sums.pop() > 0, f"each token chooses in each block: {blocks}")
        browser.run("document.querySelector('#expertmap svg[tabindex]').focus()")
        browser.type(RIGHT + RIGHT + DOWN)
        choices = blocks[1]["choices"][1]
        cell = f"Block {blocks[1]['block']}, expert 1: "
        until("the keyboard moves through the cells", lambda: browser.text("#expertmap figcaption").startswith(cell))
        caption = browser.text("#expertmap figcaption")
        check(f"({choices:,} of {sum(blocks[1]['choices']):,})" in caption if choices else "unused" in caption, f"the caption has the number {choices}: {caption}")
        browser.run("document.querySelector('#experts details').open = true")
        cells = "return [...document.querySelectorAll('#experts tbody tr')].map((row) => [...row.cells].slice(2).map((cell) => parseFloat(cell.textContent) || 0))"
        until("the table", lambda: [len(row) for row in browser.run(cells)] == [4] * len(blocks))
        for row, block in zip(browser.run(cells), blocks):
            wrong = [(cell, choices) for cell, choices in zip(row, block["choices"]) if abs(cell - 100 * choices / sum(block["choices"])) > 0.51]
            check(not wrong, f"shares and choices: {wrong}")
        print("a mixture: the newest loads of its experts")

        # An expert that no token chose, and a damaged file.
        browser.open("about:blank")
        browser.open(f"{dash.address}/#run=planted-20260131-101500")
        until("the planted loads", lambda: "After step 3: 2 blocks, up to 3 experts in each, 1 of all experts unused" in browser.text("#experts"))
        marks = browser.run("return document.querySelector('#expertmap svg[tabindex] path.unused').getAttribute('d')")
        check(marks.count("M") == 2, f"the unused expert is crossed out: {marks}")
        check("63%" in browser.text("#expertmap svg[tabindex]"), "wide cells have numbers")
        browser.run("document.querySelector('#experts details').open = true")
        until("the table names it", lambda: "✕ unused" in browser.text("#experts tbody tr:first-child"))
        browser.open("about:blank")
        browser.open(f"{dash.address}/#run=damaged-20260131-101500")
        until("the damaged file is named", lambda: "experts.json is damaged" in browser.text("#experts .problem"))
        check(series(browser, "Loss") and is_harmless(browser), "the rest is shown")
        check_quiet(browser)
        print("a mixture: unused experts and a damaged file")


def make_sweep(zerorun, folder):
    """Writes a made-up sweep that is running, for a picture."""
    folder.mkdir(parents=True)
    definition = {"command": ["finetune", "Qwen3-0.6B", "--data", "chats.jsonl"], "metric": "val_loss", "steps": 160, "trials": 32, "parameters": {
        "--lr": {"log_uniform": [1e-5, 1e-3]}, "--batch": [4, 8, 16], "--lora": ["r=8,alpha=16", "r=32,alpha=64"], "gradient_clipping": {"uniform": [0.3, 2.0]}}}
    (folder / "sweep.json").write_text(json.dumps({"format": 1, "definition": definition, "directory": "/work", "configuration": None}))
    starts = [{"event": "start", "trial": trial, "from": 0, "to": 160} for trial in range(1, 25)]
    write_lines(folder / "journal.jsonl", [{"event": "begin", "parallel": 24}, *starts])
    shown = json.loads(subprocess.run([zerorun, "sweep", "show", folder, "--json"], capture_output=True, check=True).stdout)
    noise, ends = random.Random(3), []
    for trial in shown["trials"][:22]:
        parameters = trial["parameters"]
        loss = 1.31 + 0.11 * (math.log10(parameters["--lr"]) + 3.7) ** 2 + 0.004 * parameters["--batch"] + 0.03 * ("r=8" in parameters["--lora"]) + noise.gauss(0, 0.015)
        end = {"error": "loss is NaN in step 12"} if parameters["--lr"] > 8e-4 else {"value": loss}
        ends += [{"event": "end", "trial": trial["trial"], "to": 160, **end}, {"event": "take", "trial": trial["trial"]}]
    write_lines(folder / "journal.jsonl", [{"event": "begin", "parallel": 24}, *starts, *ends])


def make_loads(path, step):
    """Writes the loads of a made-up mixture, for a picture."""
    noise = random.Random(5)
    block = lambda: [max(0, round(noise.gauss(128, 55))) if noise.random() > 0.02 else 0 for _ in range(16)]
    blocks = [{"block": number, "choices": block()} for number in range(12)]
    path.write_text(json.dumps({"step": step, "time": 1769883540, "session": 1, "blocks": blocks}))
