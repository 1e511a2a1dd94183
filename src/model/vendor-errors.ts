import { type ErrorCode, LonghaulError, Redactor } from '../core/index.ts';

/** Where a failed call went, for messages that say what to do. */
export interface Endpoint {
  /** PROVIDER/MODEL */
  ref: string;
  /** Base URL; null where the provider package chooses it. */
  baseUrl: string | null;
  /** Environment variables the key is read from. */
  keyNames: readonly string[];
  /** Values that must never be in a message. */
  secrets: readonly string[];
  /** Models the endpoint serves; null when it does not say. Never throws. */
  listModels?: () => Promise<string[] | null>;
}

/** Longest piece of a vendor's text that is repeated to a person. */
const QUOTE_CHARS = 400;
/** Longest piece that is searched for what it means. */
const READ_CHARS = 4000;

const CONTEXT_TOO_LONG =
  /context[ _-]?(length|size|window)|maximum context|prompt is too long|too many tokens|input token count|exceeds? the (maximum|model'?s) (number of )?tokens|context_length_exceeded|exceed_context_size/i;
const MODEL_UNKNOWN =
  /model[^.]{0,120}(not found|does ?n[o']t exist|not exist|unknown|is not available|not supported|not a valid)|(unknown|invalid|no such) model|model_not_found/i;
const OUT_OF_CREDIT = /insufficient_quota|exceeded your current quota|billing|credit balance/i;
const OVERLOADED = /overloaded|rate.?limit|too many requests|loading model|capacity/i;
const TLS = /^(CERT_|DEPTH_ZERO|SELF_SIGNED|UNABLE_TO_|ERR_TLS|ERR_SSL)/;

/**
 * What a thrown value or a stream's error part means. The shapes are those of the AI SDK's errors,
 * read by name rather than by class, because a provider package may bring its own copy.
 */
export async function classifyVendorError(
  thrown: unknown,
  endpoint: Endpoint,
): Promise<LonghaulError> {
  const own = causes(thrown).find((cause) => cause instanceof LonghaulError);
  if (own !== undefined) return own;
  const failure = readFailure(thrown);
  const redactor = new Redactor(endpoint.secrets);
  const said = redactor.text(failure.text).replace(/\s+/g, ' ').trim().slice(0, QUOTE_CHARS);
  const where = place(endpoint, failure.url);
  const make = (code: ErrorCode, message: string, next?: string, retryAfterMs?: number) =>
    new LonghaulError(code, message, {
      ...(next === undefined ? {} : { next }),
      ...(retryAfterMs === undefined ? {} : { retryAfterMs }),
    });
  const quote = said === '' ? '' : `: ${said}`;

  if (failure.name === 'AI_LoadAPIKeyError' || failure.name === 'AI_LoadSettingError') {
    return make('ModelRefused', `${endpoint.ref} has no API key${quote}`, keyAdvice(endpoint));
  }
  if (failure.status === null) {
    if (failure.networkCode !== null && TLS.test(failure.networkCode)) {
      return make(
        'ModelRefused',
        `The certificate of ${where} was not accepted (${failure.networkCode})`,
        'Set NODE_EXTRA_CA_CERTS to the authority that signed it, or correct --base-url.',
      );
    }
    if (failure.networkCode !== null || /^(terminated|fetch failed)$/i.test(failure.text)) {
      return make('ModelUnreachable', `${networkWords(failure.networkCode)} ${where}${quote}`);
    }
    if (CONTEXT_TOO_LONG.test(failure.text)) {
      return make('ContextTooLong', `${endpoint.ref}: the conversation is too long${quote}`);
    }
    if (failure.malformed) {
      return make(
        'ModelMalformed',
        `The answer of ${where} broke the wire format${quote}`,
        endpoint.baseUrl === null
          ? undefined
          : 'Check that --base-url points at the API itself (it often ends in /v1), and the version of the endpoint.',
      );
    }
    const code = OVERLOADED.test(failure.text) ? 'ModelOverloaded' : 'ModelUnreachable';
    return make(code, `${where} failed in the middle of its answer${quote}`);
  }

  const status = failure.status;
  const answered = `${where} answered ${status}${quote}`;
  if (status === 401 || status === 403) {
    return make('ModelRefused', answered, keyAdvice(endpoint));
  }
  if (status === 413 || (status === 400 && CONTEXT_TOO_LONG.test(failure.text))) {
    return make('ContextTooLong', `${endpoint.ref}: the conversation is too long${quote}`);
  }
  if (status === 404 || (status === 400 && MODEL_UNKNOWN.test(failure.text))) {
    const served = (await endpoint.listModels?.()) ?? null;
    return make('ModelUnknown', answered, modelAdvice(endpoint, served));
  }
  if (status === 402 || (status === 429 && OUT_OF_CREDIT.test(failure.text))) {
    return make('ModelRefused', answered, 'Top up or raise the limit of the account, then resume.');
  }
  if (status === 429 || status === 503 || status === 529) {
    return make('ModelOverloaded', answered, undefined, failure.retryAfterMs);
  }
  if (status === 408 || status === 409 || status >= 500) {
    return make(
      'ModelUnreachable',
      answered,
      'The endpoint failed; look at its own log if it is yours.',
      failure.retryAfterMs,
    );
  }
  return make(
    'ModelRefused',
    answered,
    /tool/i.test(failure.text)
      ? 'Choose a model and an endpoint that support tool calling.'
      : 'The endpoint does not accept the request; its words above say why.',
  );
}

/** Base URL without credentials and query, fit for a message. */
function publicUrl(url: string): string {
  try {
    const { origin, pathname } = new URL(url);
    return `${origin}${pathname.replace(/\/+$/, '')}`;
  } catch {
    return 'the endpoint';
  }
}

/** Milliseconds of a `retry-after-ms` or `retry-after` header (seconds or a date); undefined if absent. */
function retryAfterMs(headers: Readonly<Record<string, string>>): number | undefined {
  const find = (name: string) =>
    Object.entries(headers).find(([key]) => key.toLowerCase() === name)?.[1];
  const ms = Number(find('retry-after-ms') ?? Number.NaN);
  if (Number.isFinite(ms) && ms >= 0) return ms;
  const text = find('retry-after');
  if (text === undefined || text.trim() === '') return undefined;
  const seconds = Number(text);
  if (Number.isFinite(seconds)) return seconds >= 0 ? seconds * 1000 : undefined;
  const date = Date.parse(text);
  return Number.isNaN(date) ? undefined : Math.max(0, date - Date.now());
}

interface Failure {
  name: string;
  /** HTTP status; null where there was no answer, or it failed after its headers. */
  status: number | null;
  text: string;
  url: string | null;
  networkCode: string | null;
  retryAfterMs: number | undefined;
  malformed: boolean;
}

function readFailure(thrown: unknown): Failure {
  const failure: Failure = {
    name: '',
    status: null,
    text: typeof thrown === 'string' ? thrown : '',
    url: null,
    networkCode: null,
    retryAfterMs: undefined,
    malformed: false,
  };
  if (typeof thrown !== 'object' || thrown === null) return failure;
  const error = thrown as Record<string, unknown>;
  failure.name = typeof error.name === 'string' ? error.name : '';
  failure.text = typeof error.message === 'string' ? error.message : JSON.stringify(thrown);
  failure.malformed =
    /^AI_(JSONParse|TypeValidation|InvalidResponseData|EmptyResponseBody|NoContentGenerated)/.test(
      failure.name,
    );
  if (failure.name === 'AI_APICallError') {
    failure.url = typeof error.url === 'string' ? error.url : null;
    failure.status = typeof error.statusCode === 'number' ? error.statusCode : null;
    if (typeof error.responseHeaders === 'object' && error.responseHeaders !== null) {
      failure.retryAfterMs = retryAfterMs(error.responseHeaders as Record<string, string>);
    }
    if (typeof error.responseBody === 'string') {
      failure.text = bodyText(error.responseBody) ?? failure.text;
    }
    if (failure.status !== null && failure.status < 400) {
      // Accepted, then failed while it was read: the reason is the cause, a broken connection or form.
      failure.status = null;
      failure.malformed = true;
      if (error.cause instanceof Error) failure.text = error.cause.message;
    }
  } else if (!(thrown instanceof Error)) {
    // An error object inside the stream: `{ message, type, code }`, the code sometimes an HTTP status.
    const code = Number(error.code ?? error.status_code ?? Number.NaN);
    if (Number.isInteger(code) && code >= 400 && code < 600) failure.status = code;
    else if (typeof error.code === 'string') failure.text += ` (${error.code})`;
  }
  if (failure.status === null) failure.networkCode = networkCode(thrown);
  failure.text = failure.text.slice(0, READ_CHARS);
  return failure;
}

/** What a vendor's error body says: its message and code where it is JSON, nothing where it is a page. */
function bodyText(body: string): string | null {
  try {
    const parsed = JSON.parse(body) as Record<string, unknown>;
    const inner = (parsed.error ?? parsed) as unknown;
    if (typeof inner === 'string') return inner;
    const { message, detail, code, type } = inner as Record<string, unknown>;
    const said = message ?? detail ?? parsed.message;
    const label = [code, type].find((value) => typeof value === 'string');
    const text = typeof said === 'string' ? said : JSON.stringify(inner);
    return label === undefined || text.includes(String(label)) ? text : `${text} (${label})`;
  } catch {
    return body.trimStart().startsWith('<') || body.trim() === '' ? null : body;
  }
}

function networkCode(thrown: unknown): string | null {
  for (const error of causes(thrown)) {
    const { code } = error as NodeJS.ErrnoException;
    if (/^(E[A-Z_]+|UND_ERR_|CERT_|DEPTH_|SELF_|UNABLE_|HPE_)/.test(code ?? '')) return code!;
  }
  return null;
}

/** An error and what caused it, outermost first; of several tried addresses the first. */
function causes(thrown: unknown): Error[] {
  const chain: Error[] = [];
  let current = thrown;
  while (current instanceof Error && !chain.includes(current)) {
    chain.push(current);
    current = current instanceof AggregateError ? current.errors[0] : current.cause;
  }
  return chain;
}

function networkWords(code: string | null): string {
  switch (code) {
    case 'ECONNREFUSED':
      return 'Nothing listens at';
    case 'ENOTFOUND':
    case 'EAI_AGAIN':
      return 'The host name is not known:';
    case 'ETIMEDOUT':
    case 'UND_ERR_CONNECT_TIMEOUT':
    case 'UND_ERR_HEADERS_TIMEOUT':
    case 'UND_ERR_BODY_TIMEOUT':
      return 'No answer in time from';
    default:
      return 'The connection broke:';
  }
}

function place(endpoint: Endpoint, url: string | null): string {
  const base = endpoint.baseUrl ?? (url === null ? null : new URL(url).origin);
  return base === null ? `the endpoint of ${endpoint.ref}` : publicUrl(base);
}

function keyAdvice(endpoint: Endpoint): string {
  return endpoint.keyNames.length === 0
    ? 'Check the API key and what the endpoint accepts.'
    : `Check the API key in ${endpoint.keyNames.join(' or ')}, and that it may use this model.`;
}

function modelAdvice(endpoint: Endpoint, served: string[] | null): string {
  if (served === null) {
    return endpoint.baseUrl === null
      ? 'Check the spelling of the model, as PROVIDER/MODEL.'
      : 'Check the spelling of the model, and that --base-url is right (it often ends in /v1).';
  }
  if (served.length === 0) return 'The endpoint serves no model: load one there.';
  const shown = served.slice(0, 20).join(', ');
  const more = served.length > 20 ? `, and ${served.length - 20} more` : '';
  return `The endpoint serves: ${shown}${more}.`;
}
