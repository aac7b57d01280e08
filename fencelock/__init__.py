"""fencelock: quorum locks that mint fencing tokens, and a database that refuses stale writers."""
