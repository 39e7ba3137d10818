"""A server of one answer."""

import socketserver
import threading
import time


class FileServer(socketserver.ThreadingTCPServer):
    """Answers each connection with bytes, `pause_s` after each piece, and keeps what was asked."""

    daemon_threads = True

    def __init__(self, *pieces, pause_s=0.0):
        self.asked = []
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                server.asked.append(self.request.recv(65536).decode())
                for piece in pieces:
                    self.request.sendall(piece)
                    time.sleep(pause_s)

        super().__init__(("127.0.0.1", 0), Handler)
        self.port = self.server_address[1]

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
