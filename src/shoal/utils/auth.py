"""Members-only tables, under the import path that users know."""

from shoal.dht.authorization import (
    AccessToken,
    AuthorizedRequest,
    AuthorizedResponse,
    AuthorizerBase,
    AuthRole,
    AuthRPCWrapper,
    TokenAuthorizerBase,
)

__all__ = [
    "AccessToken",
    "AuthRPCWrapper",
    "AuthRole",
    "AuthorizedRequest",
    "AuthorizedResponse",
    "AuthorizerBase",
    "TokenAuthorizerBase",
]
