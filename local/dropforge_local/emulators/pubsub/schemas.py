"""google.pubsub.v1.SchemaService: every method is refused, and the refusal says why."""

from __future__ import annotations

from google.pubsub_v1 import types

from dropforge_local.base.errors import ApiError

from ..kit.rpc import Message, Service, methods

REASON = (
    "schemas are not emulated by the local stack: the check of a message needs a parser of Avro or Protocol Buffers "
    "sources, which the stack's environment lacks. A topic without schema_settings takes any message"
)


class Refusing:
    """An implementation of every method."""

    def __getattr__(self, method: str) -> object:
        def refuse(request: Message) -> Message:
            raise ApiError("UNIMPLEMENTED", REASON)

        return refuse


SCHEMAS = methods(
    types,
    """
    CreateSchema() Schema POST /v1/{parent=projects/*}/schemas schema
    GetSchema() Schema GET /v1/{name=projects/*/schemas/*}
    ListSchemas() ListSchemasResponse GET /v1/{parent=projects/*}/schemas
    ListSchemaRevisions() ListSchemaRevisionsResponse GET /v1/{name=projects/*/schemas/*}:listRevisions
    CommitSchema() Schema POST /v1/{name=projects/*/schemas/*}:commit *
    RollbackSchema() Schema POST /v1/{name=projects/*/schemas/*}:rollback *
    DeleteSchemaRevision() Schema DELETE /v1/{name=projects/*/schemas/*}:deleteRevision
    DeleteSchema() Empty DELETE /v1/{name=projects/*/schemas/*}
    ValidateSchema() ValidateSchemaResponse POST /v1/{parent=projects/*}/schemas:validate *
    ValidateMessage() ValidateMessageResponse POST /v1/{parent=projects/*}/schemas:validateMessage *
    """,
)
SERVICE = Service("google.pubsub.v1.SchemaService", SCHEMAS, Refusing())
