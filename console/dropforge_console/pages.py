"""The handlers of the console's pages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse

from dropforge.base import names
from dropforge.base.errors import DropforgeError, SpecProblem, first_problem
from dropforge.base.figures import age, duration, usd
from dropforge.context import Context
from dropforge.endpoints.record import EndpointRecord
from dropforge.money.bill import BY, LABEL, Group, grouped, named_costs
from dropforge.run.record import LedgerEntry, RunState
from dropforge.run.standstill import unusual
from dropforge.run.summary import Summary
from dropforge.spec import job_spec_schema
from dropforge.spec.machine import GIB
from dropforge.stages.rollout import traffic
from dropforge.stages.sweep.audit import MEANING, audit

from . import actions, cloud_logs, compare, examples, health, models, monitoring, places, preflight, views
from .access import HOW_TO_ENTER, PERSON, Access
from .asking import named_endpoint
from .live import Live
from .people import Person, Role
from .playground import MOST_SIDES, Playground, Question
from .reader import Reader, Run

T = TypeVar("T")
LogReader = Callable[[str], list[str]]  # the last lines of a resource's containers, without credentials

FRESH_SECONDS = 1.0  # a page without a stream shows at most this old content
PAGE_ROWS = 100
PAGE_MODELS = 50
MOST_MODELS = 200  # in the list of models to choose from
KEPT_PAGES = 200  # rendered pages of one version
LOG_LINES = 40
STATIC = Path(__file__).parent / "static"


class Content:
    """What a page shows, the same for everybody: its template and the template's values."""

    def __init__(self, template: str, **values: Any) -> None:
        self.template = template
        self.values = values


class Pages:
    """The pages of one deployment. A page is rendered once for each version of the content and each role, not for each
    viewer."""

    def __init__(
        self,
        context: Context,
        reader: Reader,
        live: Live,
        read_log: LogReader | None,
        playground: Playground | None,
        preflight: preflight.Ask | None,
    ) -> None:
        self._context = context
        self._project = context.settings.project
        self._reader = reader
        self._live = live
        self._read_log = read_log
        self._preflight = preflight
        self._audit = self._background(partial(audit, context), health.AUDIT_EVERY)
        self._dead_letters = self._background(partial(monitoring.dead_letters, context.cloud), health.MONITORING_EVERY)
        self._alerts = self._background(partial(monitoring.open_alerts, context.cloud), health.MONITORING_EVERY)
        # The examples of examples/local need the data and the models that a local stack makes.
        self._offered = examples.offered(is_local=read_log is not None)
        self._traffic = self._background(lambda: traffic.traffic(context, reader.endpoints()), traffic.EVERY)
        self._rendered: tuple[int, dict[str, asyncio.Task[str]]] = (-1, {})
        self._templates = Environment(
            loader=PackageLoader(__package__),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"usd": usd, "duration": duration, "exact": _exact, "gib": _gib}
        self._templates.globals |= {
            "asset": _asset,
            "project": self._project,
            "since": lambda time: age((context.now() - time).total_seconds()),
            "can_ask": playground is not None,
        }

    def _background(self, read: Callable[[], T], every: timedelta) -> health.Background[T]:
        return health.Background(read, every, self._context.now, self._live.announce)

    async def home(self, request: Request) -> Response:
        return RedirectResponse("/runs", 303)

    async def enter(self, access: Access, request: Request) -> Response:
        """GET shows a button, so that no preview of the link spends it; POST spends it."""
        if request.method == "GET":
            token, to = request.query_params.get("token", ""), request.query_params.get("next", "")
            return self._page(request, "enter.html", token=token, to=to)
        form = await _form(request)
        token, to = form.get("token", ""), form.get("next", "")
        if not access.spend(token):
            raise HTTPException(403, f"this link was used, or is older than ten minutes: {HOW_TO_ENTER}")
        is_own = to.startswith("/") and not to.startswith(("//", "/\\"))
        response = RedirectResponse(to if is_own else "/runs", 303)
        access.admit(response)
        return response

    async def runs(self, request: Request) -> Response:
        query = request.query_params
        wanted = views.Wanted(
            text=query.get("q", "")[:200],
            state=query.get("state", ""),
            target=query.get("target", ""),
            model=query.get("model", "")[:200],
            since=_day(query.get("since", "")),
            until=_day(query.get("until", "")),
            sort=query.get("sort", "created"),
        )
        page = _page_number(request)
        return await self._cached(request, f"/runs?{wanted!r}&{page}", lambda: self._runs(wanted, page))

    def _runs(self, wanted: views.Wanted, page: int) -> Content:
        now, every = self._context.now(), self._reader.runs()
        taken = views.selected(every, wanted, now)
        pages = max(1, math.ceil(len(taken) / PAGE_ROWS))
        page = min(page, pages)
        rows = [views.row(run, now) for run in taken[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]]
        targets = sorted({run.target for run in every if run.target})
        models = sorted({run.model for run in every if run.model})[:MOST_MODELS]
        working = sum(not run.state.is_terminal for run in every)
        return Content(
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
            models=models,
            query=urlencode(
                {"q" if name == "text" else name: value for name, value in wanted._asdict().items() if value}
            ),
            states=list(RunState),
            sorts=views.SORTS,
            unreadable=sorted(self._reader.unreadable.items()),
        )

    async def run(self, request: Request) -> Response:
        name = request.path_params["run"]
        by, log = _axis(request)
        return await self._cached(request, f"/runs/{name}?{by}&{log}", lambda: self._run(name, by, log), name)

    def _run(self, name: str, by: str, log: bool) -> Content:
        run = self._found(name)
        record, spec, now = run.record, run.spec, self._context.now()
        journal, before = self._reader.journal(name), self._reader.before(run)
        older = self._reader.journal(before.record.run).progress if before else []
        latest = next((event for event in reversed(journal.progress) if event.attempt == record.attempt), None)
        shown = record.state in (RunState.SUCCEEDED, RunState.DEPLOYING, RunState.TEARING_DOWN)
        kept = journal.series.get(record.attempt)
        stands = unusual(record, kept, journal.starts, spec.limits, now) if spec else None
        return Content(
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
            figures=views.figures(run, latest, stands, now),
            stands=stands,
            latest=latest,
            percent=views.percent(record, latest),
            has_progress=bool(journal.progress),
            stages=views.timeline(record, now),
            spent=sum(record.stage_seconds(now).values()),
            waits=views.wait_text(record),
            curves=views.curves(journal.progress, journal.starts, older, by, log),
            axes=list(views.AXES),
            by=by,
            log=log,
            measured=views.measured(record),
            counted=views.counted(record),
            samples=views.samples(self._reader.samples(name)) if shown else [],
            log_lines=self._log(record.resources),
            cloud_log="" if self._read_log else cloud_logs.page_of(self._project, record.resources, record.created),
            parts=views.parts(self._reader.spans(record), now),
            trace=names.trace_id(record.run),
            placed=places.placed(record, spec),
            attempts=views.attempts(record, now),
            before=before,
            diff=views.spec_diff(spec, before.spec) if spec and before and before.spec else [],
            spec_text=views.spec_text(spec) if spec else "",
            resources=views.resources(record.resources),
            snippet=views.snippet(record.run, record.endpoint, spec) if record.endpoint and spec and spec.serve else "",
        )

    def _log(self, ledger: Sequence[LedgerEntry]) -> list[str]:
        """The end of the output of the newest resource that has any. A container wrote it."""
        outputs = (self._read_log(entry.name) for entry in reversed(ledger)) if self._read_log else ()
        return next((lines[-LOG_LINES:] for lines in outputs if lines), [])

    async def compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[: compare.MOST_RUNS]
        by, log = _axis(request)
        return await self._cached(request, f"/compare?{names!r}&{by}&{log}", lambda: self._compare(names, by, log))

    def _compare(self, names: Sequence[str], by: str, log: bool) -> Content:
        runs, now = [self._found(name) for name in names], self._context.now()
        progress = [self._reader.journal(name).progress for name in names]
        return Content(
            "compare.html",
            here="",
            runs=runs,
            most=compare.MOST_RUNS,
            query="".join(f"{urlencode({'run': name})}&" for name in names),
            axes=list(views.AXES),
            by=by,
            log=log,
            losses=compare.losses(progress, by, log),
            held_out=compare.held_out(progress, by, log),
            questions=compare.questions([views.samples(self._reader.samples(name)) for name in names]),
            statuses=[views.status(Summary.of(run.record)) for run in runs],
            results=compare.results(runs, now),
            differences=compare.differences(runs),
        )

    async def models(self, request: Request) -> Response:
        page = _page_number(request)
        return await self._cached(request, f"/models?{page}", lambda: self._models(page))

    def _models(self, page: int) -> Content:
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
        return Content("models.html", here="models", models=listed, page=page, pages=pages)

    async def endpoints(self, request: Request) -> Response:
        self._traffic.look()
        return await self._cached(request, "/endpoints", self._endpoints)

    def _endpoints(self) -> Content:
        now = self._context.now()
        seen = self._traffic.latest.result if self._traffic.latest else None
        shown = [views.named(record, now, seen, self._snippet(record)) for record in self._reader.endpoints()]
        return Content("endpoints.html", here="endpoints", endpoints=shown)

    def _snippet(self, record: EndpointRecord) -> str:
        """A command that asks a named endpoint; "" while nothing serves. It quotes no row of the data."""
        run = self._reader.find(record.serving.run) if record.serving else None
        if record.serving is None or run is None or run.spec is None or run.spec.serve is None:
            return ""
        return views.snippet(record.name, named_endpoint(record, record.serving), run.spec)

    async def rollback(self, request: Request) -> Response:
        return await self._change(request, "rollback")

    async def retire(self, request: Request) -> Response:
        return await self._change(request, "retire")

    async def _change(self, request: Request, change: str) -> Response:
        """Request a change of a named endpoint."""
        person = _person(request)
        _allow(person.role.changes_endpoints, person, Role.ADMIN, "change a named endpoint")
        await self._live.look(FRESH_SECONDS)
        name = request.path_params["name"]
        if name not in {record.name for record in self._reader.endpoints()}:
            raise HTTPException(404, f"there is no endpoint {name[:80]!r}")
        await self._request({change: name}, person)
        return RedirectResponse("/endpoints", 303)

    async def ask(self, playground: Playground, request: Request) -> Response:
        """GET shows the playground of one or two endpoints. POST asks one, and streams the answer as events."""
        person = _person(request)
        _allow(person.role.asks, person, Role.SUBMITTER, "ask a model")
        if request.method == "GET":
            names = [name[:80] for name in dict.fromkeys(request.query_params.getlist("of")) if name][:MOST_SIDES]
            return await self._cached(request, f"/ask?{names!r}", lambda: self._ask(playground, names))
        try:
            question = Question.model_validate_json(await _body(request, actions.MAX_SPEC_BYTES))
        except ValidationError as error:
            raise HTTPException(422, f"the page sent what is no question: {first_problem(error)}") from None
        await self._live.look(FRESH_SECONDS)
        return StreamingResponse(playground.answer(question), media_type="text/event-stream")

    def _ask(self, playground: Playground, names: list[str]) -> Content:
        sides = [playground.side(name) for name in names]
        callees = [side.callee for side in sides if side.callee]
        first = callees[0] if callees else None
        return Content(
            "ask.html",
            here="",
            names=names,
            sides=sides,
            callees=callees,
            fields=list(dict.fromkeys(field for callee in callees for field in callee.prompt.fields)),
            system=first.prompt.system if first else None,
            samples=views.samples(self._reader.samples(first.run)) if first else [],
            offered=playground.offered(self._context.now()),
        )

    async def _request(self, content: dict[str, str], person: Person) -> None:
        try:
            await asyncio.to_thread(actions.request, content, self._context, person)
        except DropforgeError as error:
            raise HTTPException(409, str(error)) from error

    async def cost(self, request: Request) -> Response:
        by = request.query_params.get("by", "month")
        return await self._cached(request, f"/cost?{by}", lambda: self._cost(by))

    def _cost(self, by: str) -> Content:
        every, now = self._reader.runs(), self._context.now()
        priced = [run for run in every if run.state is not RunState.REJECTED]
        keys = sorted({key for run in priced for key in run.labels})
        groupings = [*BY, *(f"{LABEL}{key}" for key in keys)]
        by = by if by in groupings else "month"
        named = named_costs(self._reader.endpoints(), now)
        groups = grouped(priced, by, now, named)
        return Content(
            "cost.html",
            here="cost",
            by=by,
            groupings=groupings,
            groups=groups,
            total=Group.of("In all", priced, now, named),
            dearest=max((group.total.known for group in groups), default=0.0),
            still_open=sum(run.is_open(now) for run in priced),
        )

    async def health(self, request: Request) -> Response:
        for each in (self._audit, self._dead_letters, self._alerts):
            each.look()
        return await self._cached(request, "/health", self._health)

    def _health(self) -> Content:
        audited, dead, alerts = self._audit.latest, self._dead_letters.latest, self._alerts.latest
        differences = audited.result.differences if audited and audited.result else []
        return Content(
            "health.html",
            here="health",
            sweep=health.last_sweep(self._context),
            audited=audited,
            audit_status=audited and health.audit_status(audited),
            dead=dead,
            dead_status=dead and health.dead_letters_status(dead),
            alerts=alerts,
            alerts_status=alerts and health.alerts_status(alerts),
            meaning=MEANING,
            words=sorted({difference.difference for difference in differences}),
            unreadable=sorted(self._reader.unreadable.items()),
        )

    async def cancel(self, request: Request) -> Response:
        person = _person(request)
        _allow(person.role.submits, person, Role.SUBMITTER, "cancel a run")
        await self._live.look(FRESH_SECONDS)  # on Cloud Run, another instance may have shown the page
        run = await asyncio.to_thread(self._found, request.path_params["run"])
        what = f"cancel a run of the topic {run.record.topic}"
        _allow(person.role.cancels(run.record), person, Role.ADMIN, what)
        if _can_cancel(run, self._context.now()):
            await self._request({"cancel": run.record.run}, person)
        return RedirectResponse(f"/runs/{run.record.run}", 303)

    async def new(self, request: Request) -> Response:
        """GET shows a form, perhaps with an old run's spec. POST checks a spec, and drops a good spec if asked to."""
        person = _person(request)
        _allow(person.role.submits, person, Role.SUBMITTER, "drop a spec")
        if request.method == "GET":
            query = request.query_params
            text = await self._old_spec(query.get("from", "")) or examples.examples().get(query.get("example", ""), "")
            return self._page(request, "new.html", here="new", text=text, verdict=None, offered=self._offered)
        form = await _form(request)
        text, do = form.get("spec", ""), form.get("do")
        verdict = await asyncio.to_thread(actions.check, text, self._context, is_typed=do == "type")
        if do == "check" and not verdict.problems and self._preflight is not None:
            answers = await asyncio.to_thread(preflight.asked, self._preflight, text)
            verdict = verdict._replace(preflight=answers)
        if verdict.problems or do != "drop":
            code = 422 if verdict.problems and do != "type" else 200  # nobody has sent the text that is typed
            return self._page(request, "new.html", code, here="new", text=text, verdict=verdict, offered=self._offered)
        run = await asyncio.to_thread(actions.submit, text, self._context, person)
        return RedirectResponse(f"/runs/{run}", 303)

    async def schema(self, request: Request) -> Response:
        """The JSON Schema of a job spec, for the editor."""
        return JSONResponse(job_spec_schema())

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
            request,
            "problem.html",
            error.status_code,
            number=error.status_code,
            detail=error.detail,
            awaited=run if is_awaited else "",
        )

    async def _cached(self, request: Request, address: str, make: Callable[[], Content], run: str = "") -> Response:
        await self._live.look(FRESH_SECONDS)
        if run and not self._reader.knows(run):
            await self._live.look()  # a run that was dropped a moment ago
        role = _person(request).role
        key = f"{role.word} {address}"
        version, pages = self._rendered
        if version != self._live.version or len(pages) >= KEPT_PAGES:
            pages = {}
            self._rendered = self._live.version, pages
        if key not in pages:  # a change makes every viewer ask at the same moment: one of them renders
            pages[key] = asyncio.create_task(asyncio.to_thread(self._render, make, role))
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

    def _page(self, request: Request, template: str, code: int = 200, *, here: str = "", **values: Any) -> Response:
        content = Content(template, here=here, **values)
        return HTMLResponse(self._render(lambda: content, _person(request).role), code)

    def _render(self, make: Callable[[], Content], role: Role) -> str:
        content = make()
        template = self._templates.get_template(content.template)
        return template.render(trouble=self._live.trouble, role=role, **content.values)


def _person(request: Request) -> Person:
    """Who sends a request. The guard of the application has verified it."""
    person: Person = request.scope[PERSON]
    return person


def _allow(is_allowed: bool, person: Person, least: Role, what: str) -> None:
    """Raises HTTPException if a person's role does not allow an action."""
    if not is_allowed:
        detail = f"{person.email} is a {person.role.word} here, and may not {what}: only a {least.word} may. "
        detail += "An operator gives roles: console_submitters and console_admins in Terraform"
        raise HTTPException(403, detail.replace("a admin", "an admin"))


def _day(text: str) -> str:
    """A day as 2026-11-26; "" for another text."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        return ""


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
    body = await _body(request, 3 * actions.MAX_SPEC_BYTES)
    return dict(parse_qsl(body.decode("ascii", "replace"), max_num_fields=8))


async def _body(request: Request, most: int) -> bytes:
    """The body of a request. Raises HTTPException if it has more bytes than the limit."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HTTPException(413, f"the page sent too much; a spec has at most {actions.MAX_SPEC_BYTES:,} bytes")
    return body


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
