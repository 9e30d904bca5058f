"""The console in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import psutil
import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.base.figures import usd
from dropforge.plan import make_plan
from dropforge.spec import parse_spec

from . import axe
from .conftest import User
from .test_endpoints import REQUESTS
from .test_stack_console import enter
from .visitor import Visitor, cancel, link, visitor

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no browser test: chromium is not on PATH (Debian: apt-get install chromium)", allow_module_level=True)

pytestmark = pytest.mark.slow
Scheme = Literal["light", "dark"]
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
    cancel(user, run)
    page.get_by_text("Cancelled", exact=True).first.wait_for()  # without a reload
    assert "Cancelled" in page.title()
    page.goto(f"{visitor.root}/runs?q=noop")
    page.get_by_label(f"Compare {run}").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("link", name="noop").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


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


def test_the_page_of_a_run_appears_when_the_run_is_accepted(user: User, visitor: Visitor, browser: Browser) -> None:
    """Somebody who drops a spec comes to its page before the event of the upload comes to `submit`."""
    key = uuid.uuid4().hex
    with opened(browser, visitor, 1440, "light", is_watched=False) as page:  # Chromium logs the answer 404
        page.goto(f"{visitor.root}/runs/{names.run_id_of_message(key)}")
        page.get_by_text("it may be accepted in a moment").wait_for()
        user.publish(REQUESTS, json.dumps(user.spec("succeed")).encode(), idempotency_key=key)
        page.get_by_text("Succeeded", exact=True).first.wait_for()


def test_every_page_fits_and_is_accessible(user: User, visitor: Visitor, browser: Browser) -> None:
    """axe-core finds nothing against WCAG 2.2 AA: names of controls, contrast, headings, landmarks, sizes.

    The pictures of the pages are in build/screenshots, for people to look at.
    """
    runs = [user.drop(user.spec("succeed")) for _ in range(2)]
    for run in runs:
        user.wait(run)
        visitor.wait_for(f"/runs/{run}", lambda text: "Succeeded" in text)
    pages = {
        "runs": "/runs",
        "run": f"/runs/{runs[0]}",
        "compare": f"/compare?run={runs[0]}&run={runs[1]}",
        "models": "/models",
        "endpoints": "/endpoints",
        "cost": "/cost",
        "health": "/health",
        "new": f"/new?from={runs[0]}",
        "enter": "/enter?token=x&next=/runs",
        "problem": "/runs/no-such-run-0123456789ab",
    }
    checker = axe.script()
    with opened(browser, visitor, 1440, "light", is_watched=False) as page:  # Chromium logs the answer 404
        for name, path in pages.items():
            page.goto(visitor.root + path)
            page.get_by_role("heading", level=1).wait_for()
            if name == "new":
                page.get_by_role("button", name="Check").click()
                page.get_by_role("heading", name="Plan").wait_for()
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
