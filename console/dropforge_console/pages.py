"""The handlers of the console's pages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from dropforge.base import names
from dropforge.base.errors import DropforgeError, SpecProblem
from dropforge.base.figures import duration, usd
from dropforge.bill import BY, LABEL, Group, grouped
from dropforge.context import Context
from dropforge.run.record import LedgerEntry, RunState
from dropforge.run.summary import Summary
from dropforge.spec.machine import GIB
from dropforge.stages.sweep.audit import MEANING

from . import actions, compare, models, views
from .access import HOW_TO_ENTER, Access
from .health import Auditor, last_sweep
from .live import Live
from .reader import Reader, Run

LogReader = Callable[[str], list[str]]  # the last lines of a resource's containers, without credentials

FRESH_SECONDS = 1.0  # a page without a stream shows at most this old content
PAGE_ROWS = 100
PAGE_MODELS = 50
KEPT_PAGES = 200  # rendered pages of one version
LOG_LINES = 40
STATIC = Path(__file__).parent / "static"


class Pages:
    """The pages of one deployment. A page is rendered once for each version of the content, not for each viewer."""

    def __init__(
        self, context: Context, access: Access, reader: Reader, live: Live, read_log: LogReader | None
    ) -> None:
        self._context = context
        self._access = access
        self._reader = reader
        self._live = live
        self._read_log = read_log
        self._auditor = Auditor(context, live.announce)
        self._rendered: tuple[int, dict[str, asyncio.Task[str]]] = (-1, {})
        self._templates = Environment(
            loader=PackageLoader(__package__),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"usd": usd, "duration": duration, "exact": _exact, "gib": _gib}
        self._templates.globals |= {"asset": _asset, "project": context.settings.project}

    async def home(self, request: Request) -> Response:
        return RedirectResponse("/runs", 303)

    async def enter(self, request: Request) -> Response:
        """GET shows a button, so that no preview of the link spends it; POST spends it."""
        if request.method == "GET":
            token, to = request.query_params.get("token", ""), request.query_params.get("next", "")
            return self._page("enter.html", token=token, to=to)
        form = await _form(request)
        token, to = form.get("token", ""), form.get("next", "")
        if not self._access.spend(token):
            raise HTTPException(403, f"this link was used, or is older than ten minutes: {HOW_TO_ENTER}")
        is_own = to.startswith("/") and not to.startswith(("//", "/\\"))
        response = RedirectResponse(to if is_own else "/runs", 303)
        self._access.admit(response)
        return response

    async def runs(self, request: Request) -> Response:
        query = request.query_params
        wanted = views.Wanted(
            query.get("q", "")[:200], query.get("state", ""), query.get("target", ""), query.get("sort", "created")
        )
        page = _page_number(request)
        return await self._cached(f"/runs?{wanted!r}&{page}", lambda: self._runs(wanted, page))

    def _runs(self, wanted: views.Wanted, page: int) -> str:
        now, every = self._context.now(), self._reader.runs()
        taken = views.selected(every, wanted, now)
        pages = max(1, math.ceil(len(taken) / PAGE_ROWS))
        page = min(page, pages)
        rows = [views.row(run, now) for run in taken[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]]
        targets = sorted({run.target for run in every if run.target})
        working = sum(not run.state.is_terminal for run in every)
        return self._render(
            "runs.html",
            here="runs",
            rows=rows,
            wanted=wanted,
            page=page,
            pages=pages,
            found=len(taken),
            total=len(every),
            working=working,
            targets=targets,
            states=list(RunState),
            sorts=views.SORTS,
            unreadable=sorted(self._reader.unreadable.items()),
        )

    async def run(self, request: Request) -> Response:
        name = request.path_params["run"]
        by, log = _axis(request)
        return await self._cached(f"/runs/{name}?{by}&{log}", lambda: self._run(name, by, log), name)

    def _run(self, name: str, by: str, log: bool) -> str:
        run = self._found(name)
        record, spec, now = run.record, run.spec, self._context.now()
        journal, before = self._reader.journal(name), self._reader.before(run)
        older = self._reader.journal(before.record.run).progress if before else []
        ledger = record.resources if record.resources is not None else self._reader.store.ledger_of(record).entries
        latest = next((event for event in reversed(journal.progress) if event.attempt == record.attempt), None)
        shown = record.state in (RunState.SUCCEEDED, RunState.DEPLOYING, RunState.TEARING_DOWN)
        return self._render(
            "run.html",
            here="",
            run=run,
            record=record,
            spec=spec,
            now=now,
            status=views.status(Summary.of(record)),
            labels=views.labels(spec.labels if spec else {}),
            can_cancel=_can_cancel(run, now),
            problems=[SpecProblem(**_fields(problem)) for problem in record.problems],
            figures=views.figures(run, latest, now),
            latest=latest,
            stages=views.timeline(record, now),
            spent=sum(record.stage_seconds(now).values()),
            waits=views.wait_text(record),
            curves=views.curves(journal.progress, journal.starts, older, by, log),
            axes=list(views.AXES),
            by=by,
            log=log,
            measured=views.measured(record),
            samples=views.samples(self._reader.samples(name)) if shown else [],
            log_lines=self._log(ledger),
            attempts=views.attempts(record, now),
            before=before,
            diff=views.spec_diff(spec, before.spec) if spec and before and before.spec else [],
            spec_text=views.spec_text(spec) if spec else "",
            resources=views.resources(ledger),
        )

    def _log(self, ledger: Sequence[LedgerEntry]) -> list[str]:
        """The end of the output of the newest resource that has any. A container wrote it."""
        outputs = (self._read_log(entry.name) for entry in reversed(ledger)) if self._read_log else ()
        return next((lines[-LOG_LINES:] for lines in outputs if lines), [])

    async def compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[: compare.MOST_RUNS]
        by, log = _axis(request)
        return await self._cached(f"/compare?{names!r}&{by}&{log}", lambda: self._compare(names, by, log))

    def _compare(self, names: Sequence[str], by: str, log: bool) -> str:
        runs, now = [self._found(name) for name in names], self._context.now()
        return self._render(
            "compare.html",
            here="",
            runs=runs,
            most=compare.MOST_RUNS,
            query="".join(f"{urlencode({'run': name})}&" for name in names),
            axes=list(views.AXES),
            by=by,
            log=log,
            losses=compare.losses([self._reader.journal(name).progress for name in names], by, log),
            statuses=[views.status(Summary.of(run.record)) for run in runs],
            results=compare.results(runs, now),
            differences=compare.differences(runs),
        )

    async def models(self, request: Request) -> Response:
        page = _page_number(request)
        return await self._cached(f"/models?{page}", lambda: self._models(page))

    def _models(self, page: int) -> str:
        runs = [run.run for run in self._reader.runs() if run.has_trained]
        pages = max(1, math.ceil(len(runs) / PAGE_MODELS))
        page = min(page, pages)
        shown = self._reader.found(runs[(page - 1) * PAGE_MODELS : page * PAGE_MODELS])
        committed = self._reader.committed([run.record.run for run in shown])
        endpoints, bucket = self._reader.endpoints(), self._context.settings.runs_bucket
        listed = [
            models.model(run, committed[run.record.run], endpoints, bucket)
            for run in shown
            if run.record.run in committed
        ]
        return self._render("models.html", here="models", models=listed, page=page, pages=pages)

    async def endpoints(self, request: Request) -> Response:
        return await self._cached("/endpoints", self._endpoints)

    def _endpoints(self) -> str:
        now = self._context.now()
        shown = [views.named(record, now) for record in self._reader.endpoints()]
        return self._render("endpoints.html", here="endpoints", endpoints=shown)

    async def rollback(self, request: Request) -> Response:
        await self._live.look(FRESH_SECONDS)
        name = request.path_params["name"]
        if name not in {record.name for record in self._reader.endpoints()}:
            raise HTTPException(404, f"there is no endpoint {name[:80]!r}")
        await self._request({"rollback": name})
        return RedirectResponse("/endpoints", 303)

    async def _request(self, content: dict[str, str]) -> None:
        try:
            await asyncio.to_thread(actions.request, content, self._context)
        except DropforgeError as error:
            raise HTTPException(409, str(error)) from error

    async def cost(self, request: Request) -> Response:
        by = request.query_params.get("by", "month")
        return await self._cached(f"/cost?{by}", lambda: self._cost(by))

    def _cost(self, by: str) -> str:
        every, now = self._reader.runs(), self._context.now()
        priced = [run for run in every if run.state is not RunState.REJECTED]
        keys = sorted({key for run in priced for key in run.labels})
        groupings = [*BY, *(f"{LABEL}{key}" for key in keys)]
        by = by if by in groupings else "month"
        groups = grouped(priced, by, now)
        return self._render(
            "cost.html",
            here="cost",
            by=by,
            groupings=groupings,
            groups=groups,
            total=Group.of("In all", priced, now),
            dearest=max((group.total.known for group in groups), default=0.0),
            still_open=sum(run.is_open(now) for run in priced),
        )

    async def health(self, request: Request) -> Response:
        self._auditor.look()
        return await self._cached("/health", self._health)

    def _health(self) -> str:
        looked = self._auditor.latest
        differences = looked.result.differences if looked and looked.result else []
        return self._render(
            "health.html",
            here="health",
            sweep=last_sweep(self._context),
            looked=looked,
            meaning=MEANING,
            words=sorted({difference.difference for difference in differences}),
            unreadable=sorted(self._reader.unreadable.items()),
        )

    async def cancel(self, request: Request) -> Response:
        run = await asyncio.to_thread(self._found, request.path_params["run"])
        if _can_cancel(run, self._context.now()):
            await self._request({"cancel": run.record.run})
        return RedirectResponse(f"/runs/{run.record.run}", 303)

    async def new(self, request: Request) -> Response:
        """GET shows a form, perhaps with an old run's spec. POST checks a spec, and drops a good spec if asked to."""
        if request.method == "GET":
            text = await self._old_spec(request.query_params.get("from", ""))
            return self._page("new.html", here="new", text=text, verdict=None)
        form = await _form(request)
        text, do = form.get("spec", ""), form.get("do")
        verdict = await asyncio.to_thread(actions.check, text, self._context, is_typed=do == "type")
        if verdict.problems or do != "drop":
            code = 422 if verdict.problems and do != "type" else 200  # nobody has sent the text that is typed
            return self._page("new.html", code, here="new", text=text, verdict=verdict)
        run = await asyncio.to_thread(actions.submit, text, self._context)
        return RedirectResponse(f"/runs/{run}", 303)

    async def _old_spec(self, run: str) -> str:
        if not run:
            return ""
        await self._live.look(FRESH_SECONDS)
        spec = (await asyncio.to_thread(self._found, run)).spec
        return views.spec_text(spec) if spec else ""

    async def stream(self, request: Request) -> Response:
        run = request.query_params.get("run", "")
        if run and not names.is_run_id(run):
            raise HTTPException(404, "there is no such run")
        return StreamingResponse(self._live.stream(run), media_type="text/event-stream")

    async def problem(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "the application registers this handler for HTTPException"
        run = str(request.path_params.get("run", ""))
        is_awaited = error.status_code == 404 and names.is_run_id(run) and run not in self._reader.unreadable
        return self._page(
            "problem.html",
            error.status_code,
            number=error.status_code,
            detail=error.detail,
            awaited=run if is_awaited else "",
        )

    async def _cached(self, key: str, render: Callable[[], str], run: str = "") -> Response:
        await self._live.look(FRESH_SECONDS)
        if run and not self._reader.knows(run):
            await self._live.look()  # a run that was dropped a moment ago
        version, pages = self._rendered
        if version != self._live.version or len(pages) >= KEPT_PAGES:
            pages = {}
            self._rendered = self._live.version, pages
        if key not in pages:  # a change makes every viewer ask at the same moment: one of them renders
            pages[key] = asyncio.create_task(asyncio.to_thread(render))
        try:
            return HTMLResponse(await asyncio.shield(pages[key]))
        except Exception:
            pages.pop(key, None)
            raise

    def _found(self, name: str) -> Run:
        run = self._reader.find(name)
        if run is None:
            why = self._reader.unreadable.get(name, "it may be accepted in a moment, and its page then shows it")
            raise HTTPException(404, f"there is no run {name[:80]!r} that this console can read: {why}")
        return run

    def _page(self, template: str, code: int = 200, *, here: str = "", **values: Any) -> Response:
        return HTMLResponse(self._render(template, here=here, **values), code)

    def _render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(trouble=self._live.trouble, **values)


def _page_number(request: Request) -> int:
    text = request.query_params.get("page", "1")
    return max(1, int(text)) if text.isdecimal() and len(text) < 9 else 1


def _axis(request: Request) -> tuple[str, bool]:
    """The horizontal axis that a page asks for, and whether the vertical axis is logarithmic."""
    by = request.query_params.get("x", "step")
    return by if by in views.AXES else "step", request.query_params.get("y") == "log"


def _can_cancel(run: Run, now: datetime) -> bool:
    return run.record.cancel_requested is None and Summary.of(run.record).is_open(now)


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form that a page sends. A character takes up to three bytes in it. Raises HTTPException."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > 3 * actions.MAX_SPEC_BYTES:
            raise HTTPException(413, f"the form is too large; a spec has at most {actions.MAX_SPEC_BYTES:,} bytes")
    return dict(parse_qsl(body.decode("ascii", "replace"), max_num_fields=8))


def _fields(problem: dict[str, Any]) -> dict[str, Any]:
    return {"pointer": "", "message": "", **{name: problem.get(name) for name in SpecProblem._fields}}


def _exact(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _gib(count: int | None) -> str:
    """Bytes in GiB; a dash if the machine has none, or nobody knows."""
    return "-" if count is None else f"{count / GIB:,.1f}"


def _asset(name: str) -> str:
    """The address of a file of the page; the digest in it changes with the content."""
    return f"/static/{name}?v={_DIGESTS[name]}"


_DIGESTS = {path.name: sha256(path.read_bytes()).hexdigest()[:12] for path in STATIC.iterdir()}
