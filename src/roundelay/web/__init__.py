"""Layer 9: the local page over everything; a view is a file, its answers functions of a query."""

from roundelay.web.query import Query
from roundelay.web.view import Document, View

__all__ = ["Document", "Query", "View"]
