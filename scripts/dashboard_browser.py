"""The browser and the servers of test_dashboard.py: headless Chromium, driven by the WebDriver protocol, and processes that print the
link of their dashboard."""
import base64
import contextlib
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-extensions", "--no-default-browser-check",
         "--disable-dev-shm-usage", "--hide-scrollbars"]
# The time within which the page must show something. It only limits how long a failure takes.
PATIENCE = 120
# A text that tries to become part of the page.
PLANTED = "<img src=x onerror=window.planted=1><script>window.planted=1</script>\"'</script>"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Failure(Exception):
    """A condition that does not hold."""


def check(condition, text):
    if not condition:
        raise Failure(text)


def until(text, condition):
    """Waits until `condition` returns something true, and returns it."""
    end = time.monotonic() + PATIENCE
    while True:
        result = condition()
        if result:
            return result
        check(time.monotonic() < end, f"{text}: not after {PATIENCE} s")
        time.sleep(0.1)


class Browser:
    """A browser, driven by the WebDriver protocol."""

    def __init__(self, work):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in self.driver.stdout:
            if port := re.search(r"started successfully on port (\d+)", line):
                break
        else:
            raise Failure("chromedriver did not start")
        self.address = f"http://127.0.0.1:{port[1]}"
        options = {"args": [*FLAGS, f"--user-data-dir={work / 'browser'}"]}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"}}
        self.session = f"/session/{self.call('POST', '/session', {'capabilities': {'alwaysMatch': always}})['sessionId']}"
        self.opened, self.requested, self.console = set(), set(), []

    def call(self, method, path, body=None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise Failure(f"chromedriver: {method} {path}: {error.read().decode()[:500]}") from error

    def open(self, url):
        self.opened.add(re.match(r"\w+:(//[^/]*)?", url)[0])
        self.call("POST", f"{self.session}/url", {"url": "about:blank"})
        self.call("POST", f"{self.session}/url", {"url": url})

    def run(self, script, *arguments):
        return self.call("POST", f"{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def click(self, selector):
        element = self.call("POST", f"{self.session}/element", {"using": "css selector", "value": selector})
        self.call("POST", f"{self.session}/element/{element[ELEMENT]}/click")

    def type(self, text):
        keys = [{"type": kind, "value": letter} for letter in text for kind in ("keyDown", "keyUp")]
        self.call("POST", f"{self.session}/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": keys}]})

    def command(self, name, **arguments):
        return self.call("POST", f"{self.session}/goog/cdp/execute", {"cmd": name, "params": arguments})

    def size(self, width, height):
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def read_logs(self):
        for entry in self.call("POST", f"{self.session}/se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requested.add(message["params"]["request"]["url"])
        self.console += [entry["message"] for entry in self.call("POST", f"{self.session}/se/log", {"type": "browser"})]

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("GET", f"{self.session}/screenshot")))

    def close(self):
        with contextlib.suppress(Exception):
            self.call("DELETE", self.session)
        self.driver.terminate()
        self.driver.wait()


class Server:
    """A process that prints the link of its dashboard."""

    def __init__(self, command, **options):
        self.output = []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
        for line in self.process.stdout:
            self.output.append(line)
            if link := re.search(r"dashboard: ((http://[^/]+)/#token=([0-9a-f]+))", line):
                self.link, self.address, self.token = link.groups()
                break
        else:
            raise Failure(f"{command} printed no link: {''.join(self.output)}")
        os.set_blocking(self.process.stdout.fileno(), False)

    def drain(self):
        """Reads what the process has written, so that it does not wait for this script."""
        with contextlib.suppress(OSError, TypeError):
            while text := self.process.stdout.read(1 << 16):
                self.output.append(text)

    def get(self, path):
        with urllib.request.urlopen(self.address + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path, headers):
        request = urllib.request.Request(self.address + path, b"", headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < end:
            self.drain()
            time.sleep(0.05)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def series(browser, title):
    """Returns the path of the first curve of a chart, or None."""
    return browser.run("""const chart = [...document.querySelectorAll('figure')].find((figure) => figure.querySelector('h3').textContent === arguments[0]);
        return chart?.querySelector('svg[tabindex] path.curve:not(.raw)')?.getAttribute('d') ?? null""", title)


def steps_shown(browser):
    found = re.search(r"([\d,]+)(?: of [\d,]+)? steps", browser.text("#facts"))
    return int(found[1].replace(",", "")) if found else 0


def check_quiet(browser):
    """Checks that the pages have requested nothing from other servers, and that the browser reports no errors."""
    browser.read_logs()
    hosts = {re.match(r"https?://[^/]*", url)[0] for url in browser.requested if url.startswith("http")}
    check(hosts and hosts <= browser.opened, f"the page requested something from {hosts - browser.opened}")
    violations = [line for line in browser.console if "Content Security Policy" in line or "Uncaught" in line]
    check(not violations, f"errors in the browser: {violations}")
