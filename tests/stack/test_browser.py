"""The console in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import psutil
import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.figures import usd
from dropforge.money.plan import make_plan
from dropforge.run.record import RunState
from dropforge.run.series import Progress, Series, write_series
from dropforge.spec import parse_spec

from . import axe
from .conftest import User, user_of
from .targets import SERVES
from .test_endpoints import REQUESTS
from .test_stack_console import enter
from .visitor import Visitor, cancel, link, visitor

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no browser test: chromium is not on PATH (Debian: apt-get install chromium)", allow_module_level=True)

pytestmark = pytest.mark.slow
Scheme = Literal["light", "dark"]
# https://developer.mozilla.org/en-US/docs/Web/API/LayoutShift: shares of the window that moved; 0.1 is said to be good.
SHIFTS = """
window.shifts = 0;
new PerformanceObserver((list) => { for (const shift of list.getEntries()) window.shifts += shift.value; })
  .observe({ type: "layout-shift", buffered: true });
"""
__all__ = ["link", "visitor"]  # fixtures


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, visitor: Visitor, width: int, scheme: Scheme, *, is_watched: bool = True
) -> Iterator[Page]:
    """A page in the visitor's session. If it is watched, nothing of it was broken or forbidden by its own policy."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    name, value = next(iter(visitor.session.cookies.items()))
    context.add_cookies([{"name": name, "value": value, "url": visitor.root}])
    context.set_default_timeout(1000 * PATIENCE_SECONDS)
    page, broken = context.new_page(), []
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.on("console", lambda message: broken.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert broken == [] or not is_watched


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_a_browser_follows_a_run(user: User, visitor: Visitor, browser: Browser, scheme: Scheme, width: int) -> None:
    """The pages fit, change without a reload, work from the keyboard, and break no rule of their own policy."""
    run = user.drop(user.spec("hang"))
    user.wait(run, "TRAINING")
    with opened(browser, visitor, width, scheme) as page:
        follow(page, visitor, user, run, width)


def follow(page: Page, visitor: Visitor, user: User, run: str, width: int) -> None:
    page.goto(f"{visitor.root}/runs")
    page.keyboard.press("/")
    page.keyboard.type(run)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"q=" + run))
    page.keyboard.press("Tab")
    page.locator("body").press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{visitor.root}/runs/{run}")
    page.get_by_text("Training", exact=True).first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    watch_the_curve(page, user, run)
    cancel(user, run)
    page.get_by_text("Cancelled", exact=True).first.wait_for()  # without a reload
    assert "Cancelled" in page.title()
    page.goto(f"{visitor.root}/runs?q={run}&since=2026-01-01&sort=metric")
    for key in ("j", "x", "c"):
        page.locator("body").press(key) if key == "j" else page.keyboard.press(key)
    page.get_by_role("link", name="noop").wait_for()
    page.wait_for_load_state()  # before it, the page may be without its style sheet
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def watch_the_curve(page: Page, user: User, run: str) -> None:
    """The trainer reports a step: the curve grows, and the title says how far the training is, without a reload."""
    drawn, seen = page.locator("#loss .line.held.dots"), set[str | None]()
    series = Series(run=run, attempt=1, began=utc_now(), written=utc_now())
    generation: int | None = 0
    for step in (1, 2):
        fields = {"loss": 2.0 / step, "held_out_loss": 2.1 / step, "tokens": 800 * step}
        series.add(Progress(attempt=1, time=utc_now(), step=step, total_steps=4, **fields))
        generation = write_series(user.store.bucket.client, user.settings.runs_bucket, series, "", generation or 0)
        page.get_by_text(re.compile(rf"^{step} of 4 steps")).wait_for()
        assert f"{25 * step} %" in page.title()
        seen.add(drawn.get_attribute("d"))
    assert len(seen) == 2


def test_a_spec_is_judged_as_somebody_types_it_and_becomes_a_run(
    user: User, visitor: Visitor, browser: Browser
) -> None:
    spec = json.dumps(user.spec("succeed"), indent=2)
    with opened(browser, visitor, 1440, "light", is_watched=False) as page:  # a run's page may be 404 at first
        page.goto(f"{visitor.root}/new")
        editor, verdict = page.get_by_label("Job spec"), page.get_by_role("status")
        editor.fill(spec.replace('"training"', '"trainig"'))
        verdict.get_by_text("expected 'training'?").wait_for()
        editor.press("End")
        editor.fill(spec)
        verdict.get_by_role("heading", name="Plan").wait_for()  # nobody pressed a button
        planned = make_plan(parse_spec(spec.encode()), user.settings, "spec.json").worst_case_usd
        assert f"{usd(planned)} at most" in verdict.inner_text()
        page.get_by_role("button", name="Drop the spec").click()
        page.wait_for_url(re.compile("/runs/noop-"))
        page.get_by_text("Succeeded", exact=True).first.wait_for()


def test_the_editor_completes_a_spec_by_its_schema(visitor: Visitor, browser: Browser) -> None:
    """From the keyboard alone: fields, values that a field takes, help for a field, and the way to a problem."""
    with opened(browser, visitor, 1440, "light", is_watched=False) as page:  # an answer 422 is an error in its log
        page.goto(f"{visitor.root}/new")
        editor, choices = page.get_by_label("Job spec"), page.get_by_role("option")
        help_of = page.locator("#help")
        help_of.get_by_text("Ctrl+Space").wait_for()  # the schema has come
        editor.press_sequentially("{\n")
        editor.press("Control+Space")
        choices.filter(has_text="dataset").first.wait_for()
        editor.press("Escape")
        editor.press_sequentially('"tar')
        editor.press("Enter")  # target, the only field that begins so
        assert editor.input_value() == '{\n  "target": {}'
        editor.press_sequentially('\n"ty')
        editor.press("Enter")
        editor.press("Control+Space")
        assert {text.split()[0] for text in choices.all_inner_texts()} >= {"cloud_run", "gke", "tpu_vm", "ray"}
        editor.press_sequentially("tpu")
        editor.press("Tab")
        assert '"type": "tpu_vm"' in editor.input_value()
        editor.press_sequentially(', "')
        shown = choices.all_inner_texts()
        assert any(text.startswith("accelerator_type") for text in shown)
        assert not any(
            text.startswith(("type ", "memory_gib", "name")) for text in shown
        )  # of others, or there already
        editor.press_sequentially("data_")
        editor.press("Enter")
        assert editor.input_value().endswith('"data_disk_gib": ')
        help_of.get_by_text("data_disk_gib: integer").wait_for()
        show = page.get_by_role("button", name="Show /target/accelerator_type")
        editor.fill('{"target": {"type": "tpu_vm", "accelerator_type": 7}}')
        show.click()
        assert page.evaluate("getSelection().toString()") == '"accelerator_type"'


def test_the_page_of_a_run_appears_when_the_run_is_accepted(user: User, visitor: Visitor, browser: Browser) -> None:
    """Somebody who drops a spec comes to its page before the event of the upload comes to `submit`."""
    key = uuid.uuid4().hex
    with opened(browser, visitor, 1440, "light", is_watched=False) as page:  # Chromium logs the answer 404
        page.goto(f"{visitor.root}/runs/{names.run_id_of_message(key)}")
        page.get_by_text("it may be accepted in a moment").wait_for()
        user.publish(REQUESTS, json.dumps(user.spec("succeed")).encode(), idempotency_key=key)
        page.get_by_text("Succeeded", exact=True).first.wait_for()


def test_a_page_says_that_its_browser_is_signed_out_and_continues(
    user: User, visitor: Visitor, browser: Browser
) -> None:
    with opened(browser, visitor, 1440, "light", is_watched=False) as page:  # Chromium logs the answer 401
        page.goto(f"{visitor.root}/runs")
        cookies: Any = page.context.cookies()
        page.context.clear_cookies()
        run = user.drop(user.spec("hang"))
        trouble = page.get_by_text("This browser is signed out")
        trouble.wait_for()
        page.context.add_cookies(cookies)
        cancel(user, run)
        trouble.wait_for(state="hidden")


@pytest.fixture(scope="module")
def served(shared_stack: Path) -> Iterator[str]:
    """A run whose endpoint serves until the last test."""
    with patch.dict(os.environ):
        user = user_of(shared_stack)
        run = user.drop(user.spec("succeed", serve={"type": "cloud_run", **SERVES["cloud_run"]}))
        assert user.wait(run).state is RunState.SUCCEEDED
    yield run
    with patch.dict(os.environ):
        user_of(shared_stack).publish(user.settings.operations_topic, json.dumps({"cancel": run}).encode())


def test_somebody_asks_a_served_model(served: str, user: User, visitor: Visitor, browser: Browser) -> None:
    """The answer grows as the model writes it, can be stopped, and says why it failed."""
    visitor.wait_for(f"/runs/{served}", lambda text: "Ask the model" in text)
    with opened(browser, visitor, 1440, "light") as page:
        page.goto(f"{visitor.root}/runs/{served}")
        page.get_by_role("link", name="Ask the model").click()
        message, log = page.get_by_role("textbox", name="Message"), page.get_by_role("log")
        page.get_by_text("How to ask").click()
        page.get_by_label("Longest answer").fill("10000")  # so many parts, one each 0.05 s
        message.fill("a question")
        message.press("Control+Enter")
        log.get_by_text(re.compile("^okok")).wait_for()  # the answer has not ended
        page.get_by_role("button", name="Stop").click()
        log.get_by_text("Stopped after").wait_for()
        page.get_by_label("Longest answer").fill("")
        message.fill("fail unless it-is-this-revision")
        page.get_by_role("button", name="Ask", exact=True).click()
        log.get_by_text("answered HTTP 500").wait_for()
        message.fill("a question")
        page.get_by_role("button", name="Ask", exact=True).click()
        log.get_by_text("first word after").wait_for()
        assert user.info.environment["DROPFORGE_EMULATOR_TOKEN"] not in page.content()
        page.goto(f"{visitor.root}/ask?of={served}&of=no-such-run-0123456789ab")
        page.get_by_text("no run and no endpoint").wait_for()


def test_every_page_fits_and_is_accessible(served: str, user: User, visitor: Visitor, browser: Browser) -> None:
    """axe-core finds nothing against WCAG 2.2 AA: names of controls, contrast, headings, landmarks, sizes.

    Nothing moves while a page loads.

    The pictures of the pages are in build/screenshots, for people to look at.
    """
    runs = [user.drop(user.spec("succeed")) for _ in range(2)]
    for run in runs:
        user.wait(run)
        visitor.wait_for(f"/runs/{run}", lambda text: "Succeeded" in text)
    pages = {
        "runs": f"/runs?q={runs[0]}",  # other runs may change meanwhile, which moves their rows
        "run": f"/runs/{runs[0]}",
        "compare": f"/compare?run={runs[0]}&run={runs[1]}",
        "models": "/models",
        "endpoints": "/endpoints",
        "ask": f"/ask?of={served}&of={runs[0]}",
        "cost": "/cost",
        "health": "/health",
        "new": f"/new?from={runs[0]}",
        "enter": "/enter?token=x&next=/runs",
        "problem": "/runs/no-such-run-0123456789ab",
    }
    checker = axe.script()
    with opened(browser, visitor, 1440, "light", is_watched=False) as page:  # Chromium logs the answer 404
        page.add_init_script(SHIFTS)
        for name, path in pages.items():
            page.goto(visitor.root + path)
            page.get_by_role("heading", level=1).wait_for()
            assert page.evaluate("window.shifts") < 0.01, path
            if name == "new":
                page.get_by_role("button", name="Check").click()
                page.get_by_role("heading", name="Preflight").wait_for()
                page.get_by_role("heading", name="Plan").wait_for()
                page.locator("#help").get_by_text("Ctrl+Space").wait_for()
                for key in ("Control+Home", "ArrowRight", "Control+Space"):
                    page.get_by_label("Job spec").press(key)
                page.get_by_role("option").first.wait_for()
            if name == "ask":
                page.get_by_role("textbox", name="Message").fill("How many singers are there?")
                page.get_by_role("button", name="Ask", exact=True).click()
                page.get_by_text("first word after").wait_for()
            page.evaluate(checker)
            for scheme, width in product(get_args(Scheme), (1440, 360)):
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
                assert page.evaluate(axe.RUN) == [], (path, scheme, width)
                page.screenshot(path=SCREENSHOTS / f"{name}-{scheme}-{width}.png", full_page=True)


def test_an_open_page_continues_by_itself_after_a_kill(own_stack: Callable[[], User], browser: Browser) -> None:
    user = own_stack()
    visitor = enter(user)
    with opened(browser, visitor, 1440, "light", is_watched=False) as page:  # a lost connection is an error in its log
        page.goto(f"{visitor.root}/runs")
        page.get_by_text("No runs yet").wait_for()
        page.evaluate("window.isTheSame = true")
        stack = psutil.Process(user.info.pid)
        stack.kill()
        stack.wait(PATIENCE_SECONDS)
        user = own_stack()
        run = user.drop(user.spec("succeed"))
        page.get_by_text(run).wait_for()
        assert page.evaluate("window.isTheSame")  # nobody loaded it again
