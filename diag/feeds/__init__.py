"""Input data in all the kinds that users have, as one stream of checked batches."""

from diag.feeds.feeds import Feeds, open_feeds

__all__ = ["Feeds", "open_feeds"]
