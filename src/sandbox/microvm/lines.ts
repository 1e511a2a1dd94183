import { connect, type Socket } from 'node:net';

/** More than any line of QEMU or of the warden: a longer one means that the other end is not ours. */
const LINE_LIMIT = 1 << 20;

/** JSON lines over a unix socket. `onLine` gets objects only; what is none ends the connection. */
export class JsonLines {
  readonly #socket: Socket;
  #pending = '';
  #closed: Error | null = null;

  constructor(
    socket: Socket,
    onLine: (message: Record<string, unknown>) => void,
    onEnd: (error: Error) => void,
  ) {
    this.#socket = socket;
    const end = (error: Error) => {
      if (this.#closed) return;
      this.#closed = error;
      onEnd(error);
    };
    socket.setEncoding('utf8');
    socket.on('error', end);
    socket.on('close', () => end(new Error('the connection was closed')));
    socket.on('data', (text: string) => {
      this.#pending += text;
      const lines = this.#pending.split('\n');
      this.#pending = lines.pop()!;
      try {
        if (this.#pending.length > LINE_LIMIT) throw new Error('a line does not end');
        for (const line of lines) {
          const message: unknown = line.trim() === '' ? null : JSON.parse(line);
          if (typeof message === 'object' && message !== null)
            onLine(message as Record<string, unknown>);
        }
      } catch (error) {
        end(error as Error);
        socket.destroy();
      }
    });
  }

  send(message: Record<string, unknown>): void {
    if (!this.#closed) this.#socket.write(`${JSON.stringify(message)}\n`);
  }

  destroy(): void {
    this.#socket.destroy();
  }
}

/** Connects to a socket that a program is about to make; `gone` says why it will not any more. */
export async function connectTo(path: string, gone: () => Error | null): Promise<Socket> {
  for (;;) {
    const failed = gone();
    if (failed) throw failed;
    const socket = connect(path);
    const made = await new Promise<boolean>((resolve) => {
      socket.once('connect', () => resolve(true));
      socket.once('error', () => resolve(false));
    });
    if (made) return socket;
    await new Promise((resolve) => setTimeout(resolve, 4));
  }
}
