import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import type { LanguageModel } from 'ai';
import { LonghaulError } from '../core/index.ts';
import { aiSdkModel } from './ai-sdk.ts';
import type { Model } from './contract.ts';
import { limitedFetch } from './limited-fetch.ts';
import { llamaCppModel } from './llama-cpp.ts';
import { importOptional } from './optional-package.ts';
import { LOCAL_SERVERS, PROVIDER_PACKAGES, type ProviderPackage } from './providers.ts';

const COMPATIBLE = 'openai-compatible';
const GGUF = 'llama-cpp';

export interface ResolveOptions {
  /** `PROVIDER/MODEL`; the model's name may hold slashes. */
  ref: string;
  /** An endpoint that speaks chat completions; whatever the provider is called, it is used. */
  baseUrl?: string | undefined;
  /** Where keys are read from, usually `process.env`. */
  env: Readonly<Record<string, string | undefined>>;
  /** Folders whose `node_modules` may hold the provider's package, usually the working directory. */
  folders?: readonly string[];
  idleTimeoutMs?: number;
  timeoutMs?: number;
}

/**
 * A model by its name. Nothing is called yet, so a wrong model or a dead server shows at the first
 * `complete`. `ConfigInvalid` for a malformed name or URL, an unknown provider, a package that is not
 * installed or a key that is not set, each with what to do.
 */
export async function resolveModel(options: ResolveOptions): Promise<Model> {
  const slash = options.ref.indexOf('/');
  const provider = options.ref.slice(0, slash);
  const name = options.ref.slice(slash + 1);
  if (slash <= 0 || name === '') {
    throw new LonghaulError('ConfigInvalid', `Not a model: "${options.ref}"`, {
      next: 'Name it as PROVIDER/MODEL, for example openai-compatible/qwen3 with --base-url, or anthropic/NAME.',
    });
  }
  if (provider === GGUF && options.baseUrl === undefined) {
    return llamaCppModel({ path: name, ref: options.ref, folders: options.folders ?? [] });
  }
  const baseUrl =
    options.baseUrl ??
    LOCAL_SERVERS[provider] ??
    (provider === COMPATIBLE ? defaultBaseUrl(options.env) : undefined);
  if (baseUrl !== undefined) return compatibleModel(provider, name, baseUrl, options);
  const known = PROVIDER_PACKAGES[provider];
  if (known === undefined) throw unknownProvider(provider);
  return packagedModel(known, name, options);
}

function defaultBaseUrl(env: ResolveOptions['env']): string {
  const url = env.LONGHAUL_BASE_URL || env.OPENAI_BASE_URL;
  if (!url) {
    throw new LonghaulError('ConfigInvalid', `${COMPATIBLE} needs the URL of its endpoint`, {
      next: 'Give --base-url, for example http://127.0.0.1:8000/v1, or set LONGHAUL_BASE_URL.',
    });
  }
  return url;
}

function compatibleModel(
  provider: string,
  name: string,
  url: string,
  options: ResolveOptions,
): Model {
  const baseURL = checkedUrl(url);
  const own = PROVIDER_PACKAGES[provider]?.keyName;
  const keyNames = [...new Set(['LONGHAUL_API_KEY', ...(own ? [own] : []), 'OPENAI_API_KEY'])];
  const keyName = keyNames.find((name) => Boolean(options.env[name]));
  const apiKey = keyName === undefined ? '' : checkedKey(keyName, options.env);
  const model = createOpenAICompatible({
    name: COMPATIBLE,
    baseURL,
    includeUsage: true,
    fetch: limitedFetch,
    ...(apiKey === '' ? {} : { apiKey }),
  })(name);
  return aiSdkModel(model, {
    ...limits(options),
    ref: options.ref,
    baseUrl: baseURL,
    keyNames,
    secrets: secretsOf(apiKey, baseURL),
    listModels: () => listServedModels(baseURL, apiKey),
  });
}

async function packagedModel(
  known: ProviderPackage,
  name: string,
  options: ResolveOptions,
): Promise<Model> {
  const loaded = await importOptional(known.package, known.install, options.folders ?? []);
  const create = loaded[known.factory];
  if (typeof create !== 'function') {
    throw new LonghaulError('ConfigInvalid', `${known.package} has no ${known.factory}`, {
      next: `Run \`npm install ${known.install}\` in your project, then again.`,
    });
  }
  if (!options.env[known.keyName]) {
    throw new LonghaulError('ConfigInvalid', `${options.ref} needs an API key`, {
      next: `Set ${known.keyName} in the environment.`,
    });
  }
  const apiKey = checkedKey(known.keyName, options.env);
  const model = create({ apiKey, fetch: limitedFetch })(name) as Exclude<LanguageModel, string>;
  return aiSdkModel(model, {
    ...limits(options),
    ref: options.ref,
    keyNames: [known.keyName],
    secrets: [apiKey],
  });
}

function limits(options: ResolveOptions) {
  return {
    ...(options.idleTimeoutMs === undefined ? {} : { idleTimeoutMs: options.idleTimeoutMs }),
    ...(options.timeoutMs === undefined ? {} : { timeoutMs: options.timeoutMs }),
  };
}

function checkedUrl(text: string): string {
  let url: URL | null = null;
  try {
    url = new URL(text);
  } catch {}
  if (url === null || !['http:', 'https:'].includes(url.protocol)) {
    throw new LonghaulError('ConfigInvalid', 'The base URL is not a http or https URL', {
      next: 'Give one such as http://127.0.0.1:8000/v1.',
    });
  }
  if (url.username !== '' || url.password !== '') {
    throw new LonghaulError('ConfigInvalid', 'The base URL holds a user name or password', {
      next: 'Take them out of the URL and put the key into LONGHAUL_API_KEY.',
    });
  }
  return text.replace(/\/+$/, '');
}

/** The key, and what a query in the base URL may carry of the kind. */
/** A key that can stand in a header: a placeholder such as `…` or a stray line break cannot. */
function checkedKey(name: string, env: ResolveOptions['env']): string {
  const key = env[name] ?? '';
  if (!/^[\x21-\x7e]+$/.test(key)) {
    throw new LonghaulError(
      'ConfigInvalid',
      `${name} is no key: it holds characters that no key has`,
      {
        next: `Set ${name} to the key itself, without spaces, quotes or line breaks.`,
      },
    );
  }
  return key;
}

function secretsOf(apiKey: string, baseUrl: string): string[] {
  return [apiKey, ...new URL(baseUrl).searchParams.values()].filter((secret) => secret !== '');
}

/** Names under GET /models; null when the endpoint does not say within five seconds. */
async function listServedModels(baseUrl: string, apiKey: string): Promise<string[] | null> {
  try {
    const response = await limitedFetch(`${baseUrl}/models`, {
      headers: apiKey === '' ? {} : { authorization: `Bearer ${apiKey}` },
      signal: AbortSignal.timeout(5000),
    });
    if (!response.ok) return null;
    const { data } = (await response.json()) as { data?: unknown };
    if (!Array.isArray(data)) return null;
    return data.flatMap((entry) => {
      const id = (entry as { id?: unknown } | null)?.id;
      return typeof id === 'string' ? [id.slice(0, 200)] : [];
    });
  } catch {
    return null;
  }
}

function unknownProvider(provider: string): LonghaulError {
  const names = [
    COMPATIBLE,
    GGUF,
    ...Object.keys(LOCAL_SERVERS),
    ...Object.keys(PROVIDER_PACKAGES),
  ].sort();
  const near = names
    .map((name) => ({ name, distance: editDistance(provider.toLowerCase(), name) }))
    .filter(({ name, distance }) => distance <= Math.max(2, Math.floor(name.length / 3)))
    .sort((a, b) => a.distance - b.distance)
    .slice(0, 3)
    .map(({ name }) => name);
  const hint = near.length === 0 ? '' : `Did you mean ${near.join(' or ')}? `;
  return new LonghaulError('ConfigInvalid', `Unknown model provider "${provider}"`, {
    next: `${hint}Known: ${names.join(', ')}. Any other endpoint that speaks chat completions works with --base-url.`,
  });
}

/** Levenshtein distance. */
function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      const change = row[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1);
      next.push(Math.min(change, row[j]! + 1, next[j - 1]! + 1));
    }
    row = next;
  }
  return row[b.length]!;
}
