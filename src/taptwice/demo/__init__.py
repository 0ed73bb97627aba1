"""The opening scene, over real HTTP: `./dev demo`, or ``python -m taptwice.demo`` with the extra `demo`.

Each module knows only those above it:

    service      the payments service: a file to copy
    unprotected  the same work as most code does it, for contrast
    server       both, under uvicorn in a process of its own
    proxy        the network between client and server, which can lose a reply
    databases    a temporary SQLite file, or a schema of its own on PostgreSQL
    stage        server, proxy and client, started and ended
    play         what is played, and what it should come to
    show         how it is printed

The server is a process of its own; the others run in that of ``__main__``.
"""
