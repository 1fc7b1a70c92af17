"""What it costs to watch a large run: processor time of the monitor and of the browser that shows its page, and memory.

    python -m benchmarks.monitor_page --peers 1000 --seconds 60

A thousand peers that are made up tell their progress and their figures every second, and the page is open in Chromium.
The time of the monitor includes making these records up. Then a day is made up, minute by minute.
"""

from __future__ import annotations

import argparse
import shutil
import threading
import time

import psutil
from playwright.sync_api import sync_playwright

from shoal.monitor.page import PageServer
from shoal.monitor.run import RunView
from tests.monitor.made_up import MadeUpRun


def processor_time(processes: list[psutil.Process]) -> dict[int, float]:
    return {each.pid: sum(each.cpu_times()[:2]) for each in processes if each.is_running()}


def measure_page(peers: int, seconds: float) -> None:
    run = MadeUpRun(RunView("run"), peers, now=time.time())
    server, ended, made = PageServer(run.view), threading.Event(), [0.0]

    def feed() -> None:
        due = time.monotonic()
        while not ended.wait(max(0.0, due - time.monotonic())):
            due += 1.0
            before = time.thread_time()
            run.pass_second()
            made[0] += time.thread_time() - before

    feeder = threading.Thread(target=feed)
    feeder.start()
    me = psutil.Process()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=300_000
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1500})
        page.goto(server.url, timeout=300_000)
        page.locator("#rows tr").first.wait_for(timeout=300_000)
        time.sleep(5)
        children = [each for each in me.children(recursive=True) if "chrom" in each.name()]
        began, own, theirs, fed = time.monotonic(), time.process_time(), processor_time(children), made[0]
        news = int(page.evaluate("document.documentElement.dataset.news"))
        time.sleep(seconds)
        took = time.monotonic() - began
        news = int(page.evaluate("document.documentElement.dataset.news")) - news
        spent = {pid: total - theirs.get(pid, 0.0) for pid, total in processor_time(children).items()}
        own = time.process_time() - own
        print(f"{peers} peers, {news / took:.2f} updates of the page per second")
        print(
            f"monitor: {own / took:.1%} of a core, of which {(made[0] - fed) / took:.1%} to make up and take in records"
        )
        most = max(spent.values()) / took
        print(f"browser: {sum(spent.values()) / took:.1%} of a core, of which {most:.1%} one process")
        browser.close()
    ended.set()
    feeder.join()
    server.close()


def measure_memory(peers: int) -> None:
    me = psutil.Process()
    run = MadeUpRun(RunView("run"), peers)
    run.pass_second()
    before = me.memory_info().rss
    for _ in range(24 * 60):
        run.pass_second(60.0)
    grown = me.memory_info().rss - before
    print(f"a day of {peers} peers: the process has grown by {grown / 1e6:.1f} MB")
    print(f"the history has {run.view.history.nbytes / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--no-day", action="store_true", help="do not make up a day")
    arguments = parser.parse_args()
    measure_page(arguments.peers, arguments.seconds)
    if not arguments.no_day:
        measure_memory(arguments.peers)


if __name__ == "__main__":
    main()
