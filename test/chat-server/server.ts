import { appendFileSync, existsSync, readFileSync } from 'node:fs';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import { z } from 'zod';
import { type Reply, Scenario } from './scenario.ts';

export type { Scenario } from './scenario.ts';

const ChatBody = z.looseObject({
  model: z.string(),
  messages: z.array(z.looseObject({ role: z.string() })).min(1),
  stream: z.boolean().optional(),
  stream_options: z.looseObject({ include_usage: z.boolean().optional() }).nullish(),
});
type ChatBody = z.infer<typeof ChatBody>;

/** A chat request as it came. `attempt` counts the requests for its turn, from 0. */
interface RecordedRequest {
  turn: number;
  attempt: number;
  body: ChatBody;
}

export interface ChatServer {
  /** `http://127.0.0.1:PORT/v1` */
  readonly baseUrl: string;
  readonly port: number;
  /** Every chat request, those of earlier processes with the same log included. */
  readonly requests: readonly RecordedRequest[];
  /** Requests made for a turn. */
  count(turn: number): number;
  /** Cuts every connection and frees the port, as a kill would. */
  close(): Promise<void>;
}

/**
 * A vendor's chat-completions endpoint on loopback that plays a scenario: real HTTP, streamed with
 * arguments split over chunks, or in one piece. With `log`, requests are written as JSON lines before
 * they are answered and read back at the start, so counts survive a restart.
 */
export async function startChatServer(options: {
  scenario: Scenario;
  port?: number;
  log?: string;
}): Promise<ChatServer> {
  const scenario = Scenario.parse(options.scenario);
  const requests = options.log === undefined ? [] : readLog(options.log);

  const server = createServer((request, response) => {
    handle(request, response).catch((error: unknown) => {
      if (!response.headersSent) sendError(response, 500, String(error));
      else response.destroy();
    });
  });

  async function handle(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const path = new URL(request.url ?? '/', 'http://localhost').pathname;
    if (
      scenario.apiKey !== undefined &&
      request.headers.authorization !== `Bearer ${scenario.apiKey}`
    ) {
      return sendError(response, 401, 'Incorrect API key provided.', 'invalid_api_key');
    }
    if (request.method === 'GET' && path === '/v1/models') {
      return sendJson(response, 200, {
        object: 'list',
        data: [{ id: scenario.model, object: 'model', created: 0, owned_by: 'test' }],
      });
    }
    if (request.method !== 'POST' || path !== '/v1/chat/completions') {
      return sendError(response, 404, `No such path: ${path}`);
    }
    let body: ChatBody;
    try {
      body = ChatBody.parse(JSON.parse(await readBody(request)));
    } catch (error) {
      return sendError(response, 400, `Invalid request: ${String(error)}`);
    }
    if (body.model !== scenario.model) {
      const message = `The model \`${body.model}\` does not exist.`;
      return sendError(response, 404, message, 'model_not_found');
    }
    const turn = body.messages.filter((message) => message.role === 'assistant').length;
    const attempt = requests.filter((past) => past.turn === turn).length;
    const recorded = { turn, attempt, body };
    requests.push(recorded);
    if (options.log !== undefined) appendFileSync(options.log, `${JSON.stringify(recorded)}\n`);
    const played = scenario.turns[turn];
    if (played === undefined) {
      return sendError(response, 400, `The scenario ends before turn ${turn}.`);
    }
    const reply = Array.isArray(played) ? played[Math.min(attempt, played.length - 1)]! : played;
    await answer(response, reply, body, turn);
  }

  await new Promise<void>((resolve, reject) => {
    server.once('error', reject);
    server.listen(options.port ?? 0, '127.0.0.1', resolve);
  });
  const port = (server.address() as AddressInfo).port;
  return {
    baseUrl: `http://127.0.0.1:${port}/v1`,
    port,
    requests,
    count: (turn) => requests.filter((request) => request.turn === turn).length,
    close: () =>
      new Promise((resolve) => {
        server.close(() => resolve());
        server.closeAllConnections();
      }),
  };
}

async function answer(
  response: ServerResponse,
  reply: Reply,
  body: ChatBody,
  turn: number,
): Promise<void> {
  if (reply.error !== undefined) {
    const { status, retryAfter } = reply.error;
    if (retryAfter !== undefined) response.setHeader('retry-after', retryAfter);
    if (typeof reply.error.body === 'string') {
      response.writeHead(status, { 'content-type': 'text/html' }).end(reply.error.body);
    } else {
      sendJson(response, status, reply.error.body ?? { error: { message: `Error ${status}` } });
    }
    return;
  }
  if (body.stream !== true) return sendJson(response, 200, wholeCompletion(reply, body, turn));

  response.writeHead(200, { 'content-type': 'text/event-stream', 'cache-control': 'no-cache' });
  response.flushHeaders();
  const chunks =
    reply.raw ??
    [...streamChunks(reply, body, turn).map((chunk) => JSON.stringify(chunk)), '[DONE]'].map(
      (data) => `data: ${data}\n\n`,
    );
  for (const [i, chunk] of chunks.entries()) {
    if (reply.dropAfterChunks === i) {
      // What was written must reach the client before the connection is cut.
      await sleep(20);
      response.destroy();
      return;
    }
    if (reply.hangAfterChunks === i) return;
    if (reply.delayMs !== undefined && i > 0) await sleep(reply.delayMs);
    if (response.destroyed) return;
    response.write(chunk);
  }
  response.end();
}

function pieces(text: string, size: number): string[] {
  const characters = [...text];
  const out: string[] = [];
  for (let i = 0; i < characters.length; i += size) {
    out.push(characters.slice(i, i + size).join(''));
  }
  return out;
}

function wireCalls(reply: Reply, turn: number) {
  return (reply.toolCalls ?? []).map((call, i) => ({
    ...(call.id === null ? {} : { id: call.id ?? `call-${turn}-${i}` }),
    type: 'function' as const,
    ...(call.signature === undefined
      ? {}
      : { extra_content: { google: { thought_signature: call.signature } } }),
    function: {
      name: call.name,
      arguments:
        typeof call.arguments === 'string' ? call.arguments : JSON.stringify(call.arguments),
    },
  }));
}

function finishReason(reply: Reply): string {
  return reply.finishReason ?? (reply.toolCalls?.length ? 'tool_calls' : 'stop');
}

function wireUsage(reply: Reply) {
  const usage = reply.usage ?? { prompt: 10, completion: 5 };
  return {
    prompt_tokens: usage.prompt,
    completion_tokens: usage.completion,
    total_tokens: usage.prompt + usage.completion,
    ...(usage.cached === undefined
      ? {}
      : { prompt_tokens_details: { cached_tokens: usage.cached } }),
  };
}

function streamChunks(reply: Reply, body: ChatBody, turn: number): unknown[] {
  const base = {
    id: `chatcmpl-${turn}`,
    object: 'chat.completion.chunk',
    created: 0,
    model: body.model,
  };
  const delta = (value: object, finish: string | null = null) => ({
    ...base,
    choices: [{ index: 0, delta: value, finish_reason: finish }],
  });
  const chunks: unknown[] = [delta({ role: 'assistant', content: '' })];
  for (const text of pieces(reply.reasoning ?? '', 8)) {
    chunks.push(delta({ reasoning_content: text }));
  }
  for (const text of pieces(reply.text ?? '', 8)) chunks.push(delta({ content: text }));
  for (const [index, call] of wireCalls(reply, turn).entries()) {
    chunks.push(
      delta({
        tool_calls: [{ index, ...call, function: { name: call.function.name, arguments: '' } }],
      }),
    );
    for (const text of pieces(call.function.arguments, 5)) {
      chunks.push(delta({ tool_calls: [{ index, function: { arguments: text } }] }));
    }
  }
  chunks.push(delta({}, finishReason(reply)));
  if (body.stream_options?.include_usage === true && reply.usage !== null) {
    chunks.push({ ...base, choices: [], usage: wireUsage(reply) });
  }
  return chunks;
}

function wholeCompletion(reply: Reply, body: ChatBody, turn: number) {
  const calls = wireCalls(reply, turn);
  return {
    id: `chatcmpl-${turn}`,
    object: 'chat.completion',
    created: 0,
    model: body.model,
    choices: [
      {
        index: 0,
        message: {
          role: 'assistant',
          content: reply.text ?? null,
          ...(reply.reasoning === undefined ? {} : { reasoning_content: reply.reasoning }),
          ...(calls.length === 0 ? {} : { tool_calls: calls }),
        },
        finish_reason: finishReason(reply),
      },
    ],
    ...(reply.usage === null ? {} : { usage: wireUsage(reply) }),
  };
}

function sendJson(response: ServerResponse, status: number, body: unknown): void {
  response.writeHead(status, { 'content-type': 'application/json' }).end(JSON.stringify(body));
}

function sendError(response: ServerResponse, status: number, message: string, code?: string): void {
  sendJson(response, status, {
    error: { message, type: 'invalid_request_error', param: null, code: code ?? null },
  });
}

async function readBody(request: IncomingMessage): Promise<string> {
  const parts: Buffer[] = [];
  for await (const part of request) parts.push(part as Buffer);
  return Buffer.concat(parts).toString('utf8');
}

/** A line cut by a kill in the middle of its write is left out. */
function readLog(path: string): RecordedRequest[] {
  if (!existsSync(path)) return [];
  return readFileSync(path, 'utf8')
    .split('\n')
    .flatMap((line) => {
      try {
        return [JSON.parse(line) as RecordedRequest];
      } catch {
        return [];
      }
    });
}
