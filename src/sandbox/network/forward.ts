import { once } from 'node:events';
import {
  type ClientRequest,
  request as httpRequest,
  type IncomingMessage,
  type ServerResponse,
} from 'node:http';
import type { Socket } from 'node:net';
import { pipeline } from 'node:stream/promises';
import type { Attempt } from './attempts.ts';
import { SecretMask } from './mask.ts';
import { askedFor, endToEnd, outgoingHeaders, plainTarget, type Target } from './message.ts';
import { HTTP_PORT, HTTPS_PORT, type Rule } from './rules.ts';
import { denial, denialText, type Guest, type Session } from './session.ts';
import { failed, refused, secure } from './upstream.ts';

/** Shorter values can be guessed through the mask, and would mask innocent text. */
const MIN_SECRET_CHARACTERS = 8;

/** The headers that a rule injects, and the values that must never come back. Throws `Denied`. */
function secretsOf(rule: Rule, environment: NodeJS.ProcessEnv) {
  const headers: [string, string][] = [];
  const values: string[] = [];
  for (const [name, { env, prefix = '' }] of Object.entries(rule.inject ?? {})) {
    const value = environment[env];
    const need = `the host's variable ${env}, which rule ${rule.host} injects as ${name},`;
    if (value === undefined || value === '') throw failed(`${need} is not set`);
    if (!/^[\x20-\x7e]*$/.test(value))
      throw failed(`${need} has characters that no header may hold`);
    if (value.length < MIN_SECRET_CHARACTERS)
      throw failed(`${need} is shorter than ${MIN_SECRET_CHARACTERS} characters`);
    headers.push([name, prefix + value]);
    values.push(value);
  }
  return { headers, mask: values.length > 0 ? new SecretMask(values) : null };
}

/** Where a plain request goes: with `upgrade`, port 80 becomes 443; another port that is asked for stays. */
function outgoingPort(rule: Rule, port: number): number {
  return rule.upgrade && port === HTTP_PORT ? HTTPS_PORT : port;
}

async function answerTo(request: ClientRequest): Promise<IncomingMessage> {
  const { promise: switched, reject } = Promise.withResolvers<never>();
  request.once('upgrade', (_answer, socket) => {
    socket.destroy();
    reject(failed('the server changed the protocol, which was not asked for'));
  });
  const answered = once(request, 'response') as Promise<[IncomingMessage]>;
  const [answer] = await Promise.race([answered, switched]);
  // Once the answer has begun its own stream reports a broken connection.
  request.on('error', () => {});
  return answer;
}

async function copyAnswer(
  answer: IncomingMessage,
  response: ServerResponse,
  mask: SecretMask | null,
): Promise<void> {
  const headers = endToEnd(answer);
  const encoded = headers.some(
    ([name, value]) => /^content-encoding$/i.test(name) && !/^\s*(identity)?\s*$/i.test(value),
  );
  if (mask && encoded)
    throw failed('the server compressed its answer, in which an injected secret cannot be masked');
  const shown = (text: string) => mask?.text(text) ?? text;
  // Its body may still be on the way: the connection cannot be used again.
  if (!response.req.complete) response.shouldKeepAlive = false;
  response.writeHead(
    answer.statusCode!,
    shown(answer.statusMessage ?? ''),
    headers.flatMap(([name, value]) => [shown(name), shown(value)]),
  );
  response.flushHeaders();
  if (mask) await pipeline(answer, mask.stream(), response);
  else await pipeline(answer, response);
}

/** Serves a plain request: judges it, connects anew, writes it anew and copies the answer. */
export async function forward(
  { session, inside }: Guest,
  request: IncomingMessage,
  response: ServerResponse,
  expectsContinue: boolean,
): Promise<void> {
  const attempt = session.attempts.begin(askedFor(request, inside));
  const gone = new AbortController();
  response.once('close', () => gone.abort(failed('the guest ended the connection')));
  try {
    await exchange(session, attempt, {
      target: plainTarget(request, inside),
      request,
      response,
      expectsContinue,
      gone: gone.signal,
    });
  } catch (error) {
    const { outcome, status, message } = denial(error);
    attempt.end(outcome, message);
    if (response.headersSent || response.destroyed) {
      response.destroy();
      return;
    }
    response.writeHead(status, {
      'Content-Type': 'text/plain; charset=utf-8',
      Connection: 'close',
    });
    response.end(denialText(message));
    request.resume();
  }
}

async function exchange(
  session: Session,
  attempt: Attempt,
  guest: {
    target: Target & { path: string };
    request: IncomingMessage;
    response: ServerResponse;
    expectsContinue: boolean;
    gone: AbortSignal;
  },
): Promise<void> {
  const { context } = session;
  const { request, response, gone } = guest;
  const { path, ...target } = guest.target;
  if (/\bwebsocket\b/i.test(request.headers.upgrade ?? ''))
    throw refused(
      'a WebSocket passes only through CONNECT (wss, or a rule that names the port)',
      501,
    );
  const rule = session.admit(target, true);
  const { headers, mask } = secretsOf(rule, context.environment);
  const port = outgoingPort(rule, target.port);
  const outgoing = outgoingHeaders(
    request,
    { host: target.host, port },
    rule.upgrade ? HTTPS_PORT : HTTP_PORT,
    headers,
  );
  const signal = AbortSignal.any([gone, AbortSignal.timeout(context.limits.connectMs)]);
  const socket = await session.connect(attempt, { host: target.host, port, rule }, signal);
  try {
    const server: Socket = rule.upgrade
      ? await secure(socket, target.host, context.secureContext(), signal)
      : socket;
    const sent = httpRequest({
      createConnection: () => server,
      method: request.method,
      path,
      headers: outgoing,
      setHost: false,
      maxHeaderSize: context.limits.headerBytes,
      insecureHTTPParser: false,
    });
    // The default would drop headers beyond 2,000 without a word.
    sent.maxHeadersCount = 0;
    socket.setTimeout(context.limits.idleMs, () =>
      sent.destroy(failed('the server sent nothing for too long', 504)),
    );
    gone.addEventListener('abort', () => sent.destroy(gone.reason), { once: true });
    if (guest.expectsContinue) response.writeContinue();
    // Not a pipeline: a server that answers early and closes must not end the guest's connection too.
    request.pipe(sent);
    sent.once('close', () => request.unpipe(sent).resume());
    await copyAnswer(await answerTo(sent), response, mask);
  } finally {
    socket.destroy();
  }
}
