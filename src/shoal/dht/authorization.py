"""A DHT for members only: every call between nodes carries proof that its sender is a member.

An authority gives each member an access token, and the member signs its messages with the key that the token names. A
request also carries its time and a nonce, so a captured request is worthless after a minute, when sent a second time,
from another peer, or to another peer. The signed answer carries the same nonce.

Each swarm defines where tokens come from and which ones are valid, in a subclass of :class:`TokenAuthorizerBase`::

    class Members(TokenAuthorizerBase):
        async def get_token(self) -> AccessToken: ...            # log in
        def is_token_valid(self, token) -> bool: ...             # signed by our authority, and not expired?
        def does_token_need_refreshing(self, token) -> bool: ...

    dht = DHT(..., authorizer=Members())

The averagers, trackers and states of that process are for members only, too: see :class:`MembersOnly`. Records in the
DHT are protected separately: see :mod:`shoal.dht.crypto`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from enum import Enum
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from shoal.access.badges import ANY_ROLE, Roles
from shoal.base.clock import TOLERANCE_SECONDS, get_dht_time
from shoal.base.logs import Seldom, one_line, quoted, words_of
from shoal.dht.crypto import PrivateKey, PublicKey
from shoal.dht.storage import TimedStorage
from shoal.errors import NoAccessTokenError, P2PDaemonError, P2PHandlerError
from shoal.net.connection import Connection
from shoal.net.service import methods_of, receive_only
from shoal.net.transport import decode_header
from shoal.p2p import Call, Header, P2PContext, PeerID, ServicerBase, StubBase
from shoal.reach.checkup import Checkup
from shoal.reach.presence import Presence

logger = logging.getLogger(__name__)
_warn_seldom = Seldom(logger.warning)
MessageT = TypeVar("MessageT", bound="AuthorizedRequest | AuthorizedResponse")

# The usual length: 128 random bits never repeat by chance.
NONCE_BYTES = 16
# Timeout for the proof of membership on a new connection (chosen): the other side may have vanished, or may ask its
# authority first.
ENTER_SECONDS = 15.0
# Pause between attempts to renew a valid token (chosen): otherwise each call would wait for the authority.
RETRY_SECONDS = 10.0

REQUEST_PURPOSE, RESPONSE_PURPOSE = "shoal authorized request 1", "shoal authorized response 1"

_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Short = Annotated[bytes, Meta(max_length=1024)]
_Text = Annotated[str, Meta(max_length=256)]


class AccessToken(msgspec.Struct):
    """A member's access token, issued by an authority."""

    username: _Text = ""
    public_key: _Short = b""
    """The member's key in OpenSSH form."""
    expiration_time: float | _Text = 0.0
    """DHT time, or text such as a date if the swarm's authorizers understand it."""
    signature: Annotated[bytes, Meta(max_length=4096)] = b""
    """The authority's signature over :meth:`signed_bytes`, or another proof that the swarm's authorizers understand."""

    def __post_init__(self) -> None:
        if not isinstance(self.expiration_time, (int, float, str)):
            raise TypeError(f"expiration_time must be a number or text, got {quoted(self.expiration_time)}")

    def signed_bytes(self) -> bytes:
        """All fields but the signature, in a canonical form."""
        expiration = self.expiration_time if isinstance(self.expiration_time, str) else float(self.expiration_time)
        return msgspec.msgpack.encode(["shoal access token 1", self.username, self.public_key, expiration])


class RequestAuth(msgspec.Struct):
    """Proof that the sender of a request is a member."""

    token: AccessToken
    time: float
    """The sender's DHT time."""
    nonce: _Nonce
    """Random, different in each request."""
    signature: _Short = b""
    service_public_key: _Short = b""
    """The key of the member that may answer, in OpenSSH form; empty: any member."""

    @property
    def client_access_token(self) -> AccessToken:
        """Another name of :attr:`token`."""
        return self.token


class ResponseAuth(msgspec.Struct):
    """Proof that the sender of an answer is a member."""

    token: AccessToken
    nonce: _Nonce
    """The nonce of the request."""
    signature: _Short = b""

    @property
    def service_access_token(self) -> AccessToken:
        """Another name of :attr:`token`."""
        return self.token


class AuthorizedRequest(Header, kw_only=True, omit_defaults=True):
    """Base class of requests that an authorizer can sign."""

    auth: RequestAuth | None = None


class AuthorizedResponse(Header, kw_only=True, omit_defaults=True):
    """Base class of answers that an authorizer can sign."""

    auth: ResponseAuth | None = None


_call_at_hand: ContextVar[str] = ContextVar("the call that is signed or checked", default="")


def _chosen(call: str | None) -> str:
    return _call_at_hand.get() if call is None else call


async def _for_call(method: Callable[..., Awaitable[Any]], *messages: Header, call: str) -> Any:
    """Call a method of an authorizer, which may be one of a program that knows no ``call``."""
    accepted = inspect.signature(method).parameters
    token = _call_at_hand.set(call)
    try:
        if "call" in accepted:
            return await method(*messages, call=call)
        if "service_public_key" in accepted:
            return await method(*messages, service_public_key=None)
        return await method(*messages)
    finally:
        _call_at_hand.reset(token)


class AuthorizerBase(ABC):
    """Signs and checks the messages between members.

    ``call`` names the method, the caller and the peer that is called; both sides know it, so it is not sent. A subclass
    may leave it out of its methods; without it, the methods here take that of the call at hand.
    """

    @abstractmethod
    async def prepare(self) -> None:
        """Called when a node starts; if this raises, the node does not start."""

    @abstractmethod
    async def sign_request(self, request: AuthorizedRequest, call: str | PublicKey | None = None) -> None:
        """Fill in ``request.auth``.

        Args:
            request: the request.
            call: see above; or the public key of the only member that may answer.
        """

    @abstractmethod
    async def validate_request(self, request: AuthorizedRequest, call: str | None = None) -> bool:
        """Whether the request comes from a member and is new."""

    @abstractmethod
    async def sign_response(
        self, response: AuthorizedResponse, request: AuthorizedRequest, call: str | None = None
    ) -> None:
        """Fill in ``response.auth``."""

    @abstractmethod
    async def validate_response(
        self, response: AuthorizedResponse, request: AuthorizedRequest, call: str | None = None
    ) -> bool:
        """Whether the answer comes from a member and belongs to the request."""


class TokenAuthorizerBase(AuthorizerBase):
    """Membership by access tokens.

    Args:
        local_private_key: signs what this process sends; by default the key of the process.
    """

    def __init__(self, local_private_key: PrivateKey | None = None) -> None:
        self._local_private_key = PrivateKey.process_wide() if local_private_key is None else local_private_key
        self._local_public_key = self._local_private_key.get_public_key()
        self._local_token: AccessToken | None = None
        self._refreshing = asyncio.Lock()
        # The last failure to get a token, and its loop time.
        self._failure: Exception | None = None
        self._failed_at = float("-inf")
        # The requests of the last minutes, so that each is answered only once. Room for over a thousand per second.
        self._seen: TimedStorage[tuple[bytes, bytes], None] = TimedStorage(2**18)

    @abstractmethod
    async def get_token(self) -> AccessToken:
        """Get a new token for :attr:`local_public_key` from the authority. There is only one call at a time."""

    @abstractmethod
    def is_token_valid(self, access_token: AccessToken) -> bool:
        """Whether a token, of any member, was issued by the authority and has not expired."""

    @abstractmethod
    def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
        """Whether this member's own token should be replaced, because it expires soon."""

    @property
    def local_public_key(self) -> PublicKey:
        """The key that this member's token must name."""
        return self._local_public_key

    async def prepare(self) -> None:
        await self.refresh_token_if_needed()

    async def refresh_token_if_needed(self) -> AccessToken:
        """This member's token; a new one if the old one needs refreshing.

        Raises:
            NoAccessTokenError: there is no token, because ``get_token`` failed or returned one that is not valid.
        """
        now = asyncio.get_running_loop().time
        began_at = now()
        async with self._refreshing:
            token = self._local_token
            if token is not None and not self.does_token_need_refreshing(token):
                return token
            waits = token is not None and now() - self._failed_at < RETRY_SECONDS and self._accepts(token)
            if not waits and self._failed_at <= began_at:  # otherwise this call has waited for the failed attempt
                try:
                    token = self._local_token = self._checked(await self.get_token())
                    return token
                except Exception as e:  # the user's code, which may ask a server
                    self._failure, self._failed_at = e, now()
                    if token is not None and self._accepts(token):
                        logger.warning("the access token could not be refreshed: %s: %s", type(e).__name__, words_of(e))
            if token is not None and self._accepts(token):
                return token
            reason = one_line(f"{type(self._failure).__name__}: {self._failure}")
            raise NoAccessTokenError(f"no access token to take part with: {reason}") from self._failure

    async def _log_in_first(self) -> None:
        """Get a token first if there was no :meth:`prepare`, because the authority's key may come with it."""
        if self._local_token is None:
            await self.refresh_token_if_needed()

    def _checked(self, token: AccessToken) -> AccessToken:
        if token.public_key != self._local_public_key.to_bytes():
            raise ValueError("get_token() gave a token for another key than local_public_key")
        if not self._accepts(token):
            raise ValueError("get_token() gave a token that is_token_valid() refuses")
        return token

    async def sign_request(self, request: AuthorizedRequest, call: str | PublicKey | None = None) -> None:
        token = await self.refresh_token_if_needed()
        request.auth = RequestAuth(token, get_dht_time(), secrets.token_bytes(NONCE_BYTES))
        if call is None or isinstance(call, str):
            call = _chosen(call)
        else:
            request.auth.service_public_key, call = call.to_bytes(), _call_at_hand.get()
        request.auth.signature = self._local_private_key.sign(signed_bytes(REQUEST_PURPOSE, call, request))

    async def validate_request(self, request: AuthorizedRequest, call: str | None = None) -> bool:
        call = _chosen(call)
        auth = request.auth
        if auth is None:
            return _refuse(call, "it is not signed")
        await self._log_in_first()
        if not abs(get_dht_time() - auth.time) <= TOLERANCE_SECONDS:
            return _refuse(call, "its time is not now")
        if not self._is_signed(auth, signed_bytes(REQUEST_PURPOSE, call, request)):
            return _refuse(call, "no valid token, or no valid signature")
        if auth.service_public_key not in (b"", self._local_public_key.to_bytes()):
            return _refuse(call, "it is for another member")
        request_id = auth.token.public_key, auth.nonce
        if request_id in self._seen:
            return _refuse(call, "it was answered before")
        self._seen.store(request_id, None, get_dht_time() + 3 * TOLERANCE_SECONDS)
        return True

    async def sign_response(
        self, response: AuthorizedResponse, request: AuthorizedRequest, call: str | None = None
    ) -> None:
        call = _chosen(call)
        assert request.auth is not None, "only answers to signed requests are signed"
        response.auth = ResponseAuth(await self.refresh_token_if_needed(), request.auth.nonce)
        response.auth.signature = self._local_private_key.sign(signed_bytes(RESPONSE_PURPOSE, call, response))

    async def validate_response(
        self, response: AuthorizedResponse, request: AuthorizedRequest, call: str | None = None
    ) -> bool:
        call = _chosen(call)
        auth = response.auth
        if auth is None or request.auth is None:
            return _refuse(call, "its answer is not signed")
        await self._log_in_first()
        if auth.nonce != request.auth.nonce:
            return _refuse(call, "its answer belongs to another request")
        if not self._is_signed(auth, signed_bytes(RESPONSE_PURPOSE, call, response)):
            return _refuse(call, "its answer has no valid token, or no valid signature")
        return True

    def _is_signed(self, auth: RequestAuth | ResponseAuth, signed: bytes) -> bool:
        if not self._accepts(auth.token):
            return False
        try:
            key = PublicKey.from_bytes(auth.token.public_key)
        except ValueError:
            return False
        return key.verify(signed, auth.signature)

    def _accepts(self, token: AccessToken) -> bool:
        try:
            return bool(self.is_token_valid(token))
        except Exception as e:  # the user's code, and the token may be hostile
            _warn_seldom("is_token_valid() failed, so the token is refused: %s: %s", type(e).__name__, e)
            return False


def _refuse(call: str, reason: str) -> bool:
    logger.debug("%s is refused: %s", call, reason)
    return False


def signed_bytes(purpose: str, call: str, message: MessageT) -> bytes:
    """The signed data: the whole message except the signature, as the other side will read it."""
    assert message.auth is not None
    signature, message.auth.signature = message.auth.signature, b""
    try:
        encoded = msgspec.msgpack.encode(message)
    finally:
        message.auth.signature = signature
    # Decode it once, because an int in a float field arrives as a float.
    as_received = decode_header(encoded, type(message))
    return msgspec.msgpack.encode([purpose, call, as_received])


class AuthRole(Enum):
    """The side of a call that a wrapper is on."""

    CLIENT = 0
    SERVICER = 1


class AuthRPCWrapper:
    """Wraps a servicer or a stub, and lets only members through.

    For a servicer, give it to :meth:`ServicerBase.add_p2p_handlers` as wrapper: only requests of members are answered.
    For a client, call it like the stub: if the answer does not come from a member, it returns ``None``.

    Args:
        stub: a :class:`ServicerBase`, or for a client the stub of one.
        role: which of the two it is.
        authorizer: signs and checks the messages.

    Raises:
        TypeError: a method of the servicer does not take an :class:`AuthorizedRequest` and return an
            :class:`AuthorizedResponse`.
    """

    def __init__(self, stub: ServicerBase | StubBase, role: AuthRole, authorizer: AuthorizerBase) -> None:
        self._stub = stub
        self._role = role
        self._authorizer = authorizer
        servicer = stub.servicer if isinstance(stub, StubBase) else type(stub)
        for method in methods_of(servicer):
            takes, gives = method.request_type or Header, method.response_type or Header
            is_signable = issubclass(takes, AuthorizedRequest) and issubclass(gives, AuthorizedResponse)
            if method.is_streaming or not is_signable:
                raise TypeError(
                    f"{servicer.__name__}.{method.name} cannot be authorized: it must take one message of a subclass "
                    "of AuthorizedRequest and return one of AuthorizedResponse"
                )

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        if not name.startswith("rpc_"):
            return method
        wrapped = self._asking(name, method) if self._role is AuthRole.CLIENT else self._answering(method)
        setattr(self, name, wrapped)
        return wrapped

    def _asking(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        assert isinstance(self._stub, StubBase), "a client wraps the stub of a servicer"
        context = self._stub.context_of(name)
        call = _description(context.handle_name, context.local_id, context.remote_id)

        async def ask(request: AuthorizedRequest, timeout: float | None = None) -> AuthorizedResponse | None:
            await _for_call(self._authorizer.sign_request, request, call=call)
            response = await method(request, timeout)
            return (
                response if await _for_call(self._authorizer.validate_response, response, request, call=call) else None
            )

        return ask

    def _answering(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answer(request: AuthorizedRequest, context: P2PContext) -> AuthorizedResponse | None:
            call = _description(context.handle_name, context.remote_id, context.local_id)
            if not await _for_call(self._authorizer.validate_request, request, call=call):
                return None
            response: AuthorizedResponse = await method(request, context)
            await _for_call(self._authorizer.sign_response, response, request, call=call)
            return response

        return answer


class EnterRequest(AuthorizedRequest):
    """Asks for access, with proof of membership."""


class EnterResponse(AuthorizedResponse):
    """Grants access, with proof of membership."""


class MembersOnly(ServicerBase):
    """Guards a peer whose DHT is for members only: its averagers, states and trackers are for members, too.

    Here the user's own authority decides who is a member. In a private run, the other side has also shown its badge
    before, and both checks must succeed.

    The peer that has opened a connection proves once that it is a member, and gets proof that the other side is one.
    Requests to the DHT carry a proof each. Requests about a peer's presence or reachability need no proof.

    Args:
        own_id: id of the guarded peer.
        authorizer: signs and checks the messages.
        self_checking: the servicer whose requests carry proofs of their own.
    """

    roles: ClassVar[Roles] = ANY_ROLE

    def __init__(self, own_id: PeerID, authorizer: AuthorizerBase, self_checking: type[ServicerBase]) -> None:
        self._own_id, self._authorizer = own_id, authorizer
        open_to_all = (type(self), self_checking, Presence, Checkup)
        self._open = tuple(servicer.handle_name("", None) for servicer in open_to_all)

    def guards(self, handle: str) -> bool:
        return not handle.startswith(self._open)

    async def enter(self, connection: Connection) -> None:
        peer, name = connection.remote, self.handle_name("rpc_enter", None)
        request, description = EnterRequest(), _description(name, self._own_id, peer)
        await _for_call(self._authorizer.sign_request, request, call=description)
        try:
            async with asyncio.timeout(ENTER_SECONDS):
                response = await connection.open_call(name).ask(request, EnterResponse)
        except TimeoutError:
            raise P2PDaemonError(f"peer {peer} has not let this peer in within {ENTER_SECONDS:.0f} s") from None
        except (P2PDaemonError, P2PHandlerError) as e:
            raise P2PDaemonError(f"peer {peer} does not let this peer in, or is no member itself: {e}") from e
        if not await _for_call(self._authorizer.validate_response, response, request, call=description):
            raise P2PDaemonError(f"peer {peer} does not prove that it is a member")
        connection.is_member = True

    async def rpc_enter(self, call: Call, context: P2PContext) -> None:
        """Grant access to the connection of a member; refuse all others."""
        request = await receive_only(call, EnterRequest, context.handle_name)
        description = _description(context.handle_name, context.remote_id, context.local_id)
        if not await _for_call(self._authorizer.validate_request, request, call=description):
            raise P2PDaemonError("no valid proof of membership")
        response = EnterResponse()
        await _for_call(self._authorizer.sign_response, response, request, call=description)
        call.connection.is_member = True
        await call.send(response, end=True)


def _description(handle_name: str, caller: PeerID, servicer: PeerID) -> str:
    return f"{handle_name} called by {caller} at {servicer}"
