"""A mail server on a thread: SMTP with STARTTLS or TLS, AUTH PLAIN and LOGIN, and refusals that a test chooses."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from dataclasses import dataclass, field


@dataclass
class MailServer:
    """`answers` replaces the answer to a command: {"RCPT": "550 no such user"}, or "" to drop the connection.

    `users` are the passwords by user. `starttls` says whether the server offers STARTTLS; `is_tls`, whether it begins
    with TLS. Login and mail are refused before TLS.
    """

    context: ssl.SSLContext | None = None
    is_tls: bool = False
    starttls: bool = True
    users: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    needs_tls: bool = True
    mails: list[bytes] = field(default_factory=list)
    recipients: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def __enter__(self) -> MailServer:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                Session(self, connection).run()
            except OSError:
                continue


class Session:
    """One connection of a client."""

    def __init__(self, server: MailServer, connection: socket.socket) -> None:
        self.server, self.connection, self.is_tls, self.is_known = server, connection, False, False
        if server.is_tls:
            self._begin_tls()
        self.lines = self.connection.makefile("rb")

    def run(self) -> None:
        """Answer until the client quits or leaves."""
        try:
            self._say(self.server.answers.get("CONNECT", "220 mail.test ESMTP"))
            while line := self.lines.readline():
                word = line.split(b" ")[0].strip().upper().decode()
                self.server.commands.append(word)
                if not self._answer(word, line.decode().strip()):
                    return
        finally:
            self.lines.close()
            self.connection.close()

    def _answer(self, word: str, line: str) -> bool:
        chosen = self.server.answers.get(word)
        if chosen is not None and not (word == "RCPT" and "good@" in line):
            if chosen:
                self._say(chosen)
            return bool(chosen)
        if word == "EHLO":
            starttls = "250-STARTTLS\r\n" if self.server.starttls and not self.is_tls else ""
            self._say(f"250-mail.test\r\n{starttls}250 AUTH PLAIN LOGIN")
        elif word == "STARTTLS":
            self._say("220 go ahead")
            self.lines.close()
            self._begin_tls()
            self.lines = self.connection.makefile("rb")
        elif word == "AUTH":
            self._authenticate(line)
        elif word in ("MAIL", "RCPT") and ((self.server.needs_tls and not self.is_tls) or not self._may_send()):
            self._say("530 Authentication required")
        elif word == "DATA":
            self._say("354 go ahead")
            self._take()
            self._say(self.server.answers.get("END", "250 taken"))
        elif word == "QUIT":
            self._say("221 bye")
            return False
        else:
            if word == "RCPT":
                self.server.recipients.append(line.partition("<")[2].partition(">")[0])
            self._say("250 fine")
        return True

    def _may_send(self) -> bool:
        return self.is_known or not self.server.users

    def _authenticate(self, line: str) -> None:
        _, method, initial = (line + "  ").split(" ", 2)
        if method == "PLAIN":
            _, user, password = base64.b64decode(initial.strip()).decode().split("\0")
            self.is_known = self.server.users.get(user) == password
        self._say("235 welcome" if self.is_known else "535 Authentication credentials invalid")

    def _take(self) -> None:
        mail = b""
        while (line := self.lines.readline()) != b".\r\n":
            if not line:
                raise ConnectionResetError
            mail += line.removeprefix(b".")
        self.server.mails.append(mail)

    def _begin_tls(self) -> None:
        assert self.server.context
        self.connection = self.server.context.wrap_socket(self.connection, server_side=True)
        self.is_tls = True

    def _say(self, text: str) -> None:
        self.connection.sendall(f"{text}\r\n".encode())
