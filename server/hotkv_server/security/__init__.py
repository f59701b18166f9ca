"""Access control: the identity of peers, their tenants, single-use tickets, access to the status
page, and checks of files and paths before a server starts."""
