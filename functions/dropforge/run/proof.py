"""The run's key: containers prove with it that they belong to a run.

The containers of all runs have the same account. So Cloud Storage and Pub/Sub do not know to which run a writer
belongs. The first submission of a day writes a random key to keys/days/<day> in the runs bucket, which only functions
may read (terraform/iam.tf). The key of a run derives from the key of the day on which the run was accepted, so no run
has to write or read a key of its own. The functions give the run's key to the containers of that run, and to no other
container; it says nothing about the key of the day, or of another run. What a container writes for the control plane,
or for a later attempt of its run, carries a proof: an HMAC-SHA256 (RFC 2104) of the object's name and content.

The command line and the console may not read keys: they read with the key "", which checks nothing, and decide nothing.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from random import Random
from typing import Any

VARIABLE = "DROPFORGE_RUN_KEY"  # in the environment of every container of the run
PROOF = "proof"  # the attribute of a job event's message, and the field of a JSON document
# These stand for the name of the object: in the proof of a job event, and in that of a request for access.
EVENT_NAME, ACCESS_NAME = "job-event", "access"


def new_key(chance: Random) -> str:
    """A random key of 256 bits, as 64 hexadecimal digits. `chance` is random.SystemRandom, but in a simulation."""
    return f"{chance.getrandbits(256):064x}"


def key_of_run(day_key: str, run: str) -> str:
    """The key of a run that was accepted on the day of this key: an HMAC-SHA256, as 64 hexadecimal digits."""
    return hmac.digest(day_key.encode(), f"run\n{run}".encode(), "sha256").hex()


def proof(key: str, name: str, content: bytes) -> str:
    """The proof that a holder of `key` wrote `content` as the object `name`; "" without a key."""
    return hmac.digest(key.encode(), f"{name}\n".encode() + content, "sha256").hex() if key else ""


def is_proved(key: str, name: str, content: bytes, claimed: object) -> bool:
    """Whether `claimed` is the proof of the content. A reader without the key takes everything as proved."""
    if not key:
        return True
    if not isinstance(claimed, str) or not claimed.isascii():  # JSON may have half a surrogate pair, which has no bytes
        return False
    return hmac.compare_digest(proof(key, name, content).encode(), claimed.encode())


def with_proof(key: str, name: str, document: Mapping[str, Any]) -> bytes:
    """A JSON document with its proof; without a key, only the document. The proof is about all other fields."""
    return json.dumps(proved(key, name, document), indent=2).encode() + b"\n"


def proved(key: str, name: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document with its proof as a further field; without a key, the document itself."""
    return {**document, PROOF: proof(key, name, _canonical(document))} if key else document


def is_document_proved(key: str, name: str, data: bytes) -> bool:
    """Whether a JSON document, as read from the object `name`, has its proof. False for text that is no JSON object."""
    if not key:
        return True
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(document, dict):
        return False
    claimed = document.pop(PROOF, None)
    return is_proved(key, name, _canonical(document), claimed)


def _canonical(document: Mapping[str, Any]) -> bytes:
    """The same bytes for every spelling of a document: sorted keys, no spaces, ASCII. startup.sh has a copy of this."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
