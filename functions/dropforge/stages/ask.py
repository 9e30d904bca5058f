"""The stage ask: the console gets a token for one endpoint, so that people can ask its model in a browser.

The console's account may call this function and no other service. A condition of IAM cannot give it the endpoints
alone: Cloud Run is none of the services whose resource names a condition knows
(https://docs.cloud.google.com/iam/docs/conditions-resource-attributes). So the account of this function may call every
service, and the function gives away no more than an identity token for the URL of one endpoint. Cloud Run refuses a
token at every other URL (https://cloud.google.com/run/docs/authenticating/service-to-service).
"""

from __future__ import annotations

from dropforge.base.errors import NotFound
from dropforge.base.names import is_endpoint_name
from dropforge.cloud.classify import classify, client_errors
from dropforge.context import Context

from .answers import Lent


def ask(context: Context, of: str) -> Lent:
    """A token for the endpoint `of`: a run, or a named endpoint.

    Raises NotFound if no endpoint on Cloud Run answers there, and CloudError if Google gives no token.
    """
    url = _url(context, of)
    try:
        token = context.cloud.clients.identity_token(url)
    except client_errors() as error:
        raise classify(error) from error
    context.log("lent a token", stage="ask", endpoint=of)
    return Lent(token=token)


def _url(context: Context, of: str) -> str:
    """The URL of an endpoint, as the control plane has noted it. Raises NotFound."""
    named = context.endpoints.find(of) if is_endpoint_name(of) else None
    if named is not None:
        run, url = (named.serving.run, named.url) if named.serving and not named.retired else ("", "")
    else:
        endpoint = context.store.record(of).endpoint
        run, url = of, endpoint.url if endpoint is not None and not endpoint.ended else ""
    serve = context.store.spec(run).serve if url else None
    if serve is None or serve.credential != "identity_token":
        raise NotFound(f"no endpoint on Cloud Run answers for {of!r}")
    return url
