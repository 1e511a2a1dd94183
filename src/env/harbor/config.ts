import { parse as parseToml, TomlError } from 'smol-toml';
import { z } from 'zod';
import { taskInvalid } from './invalid.ts';

/** Seconds. A day is the most that any limit may be: Node's timers end at 24.8 days. */
const Seconds = z.number().positive().max(86_400);
const NetworkMode = z.enum(['public', 'no-network', 'allowlist']);
const Env = z.record(z.string().regex(/^[A-Za-z_][A-Za-z0-9_]*$/), z.string());

const Healthcheck = z.strictObject({
  command: z.string(),
  interval_sec: Seconds.optional(),
  timeout_sec: Seconds.optional(),
  start_period_sec: z.number().nonnegative().optional(),
  start_interval_sec: Seconds.optional(),
  retries: z.number().int().nonnegative().optional(),
});

const McpServer = z.strictObject({
  name: z.string().min(1),
  transport: z.string().optional(),
  url: z.string().optional(),
  command: z.string().optional(),
  args: z.array(z.string()).optional(),
});

/** Sizes as the deprecated keys write them: "4G", "512M". */
const Size = z.string().regex(/^\d+(\.\d+)?\s*[kKmMgGtT](i?[bB])?$/, 'a size such as "4G"');

const network = {
  network_mode: NetworkMode.optional(),
  allowed_hosts: z.array(z.string()).optional(),
};
const user = { user: z.union([z.string(), z.number().int().nonnegative()]).optional() };

const Section = {
  task: z.strictObject({
    name: z.string().min(1).optional(),
    description: z.string().optional(),
    authors: z.array(z.strictObject({ name: z.string(), email: z.string().optional() })).optional(),
    keywords: z.array(z.string()).optional(),
  }),
  verifier: z.strictObject({
    timeout_sec: Seconds.optional(),
    env: Env.optional(),
    environment_mode: z.enum(['shared', 'separate']).optional(),
    environment: z.record(z.string(), z.unknown()).optional(),
    collect: z.array(z.unknown()).optional(),
    ...user,
    ...network,
  }),
  agent: z.strictObject({ timeout_sec: Seconds.optional(), ...user, ...network }),
  environment: z.strictObject({
    build_timeout_sec: Seconds.optional(),
    docker_image: z.string().optional(),
    os: z.string().optional(),
    cpus: z.number().positive().max(1024).optional(),
    memory_mb: z.number().int().positive().optional(),
    storage_mb: z.number().int().positive().optional(),
    memory: Size.optional(),
    storage: Size.optional(),
    gpus: z.number().int().nonnegative().optional(),
    gpu_types: z.array(z.string()).optional(),
    allow_internet: z.boolean().optional(),
    mcp_servers: z.array(McpServer).optional(),
    env: Env.optional(),
    skills_dir: z.string().optional(),
    workdir: z.string().optional(),
    healthcheck: Healthcheck.optional(),
    ...network,
  }),
  solution: z.strictObject({ env: Env.optional() }),
};

/**
 * The keys of `[metadata]` that Longhaul reads; everything else in there is the author's.
 * `reward_range` bounds what the verifier may report (default [0, 1]).
 */
const Metadata = z.looseObject({
  category: z.string().optional(),
  difficulty: z.string().optional(),
  split: z.enum(['train', 'heldout']).optional(),
  reward_range: z
    .tuple([z.number(), z.number()])
    .refine(([low, high]) => low < high, 'two numbers [low, high] with low < high')
    .optional(),
});

const TaskToml = z.strictObject({
  schema_version: z
    .string()
    .regex(/^1(\.\d+)*$/, 'version 1 of the format, such as "1.1"')
    .optional(),
  version: z.union([z.string(), z.number()]).optional(),
  task: Section.task.optional(),
  metadata: Metadata.optional(),
  verifier: Section.verifier.optional(),
  agent: Section.agent.optional(),
  environment: Section.environment.optional(),
  solution: Section.solution.optional(),
  artifacts: z.array(z.unknown()).optional(),
  source: z.string().optional(),
  multi_step_reward_strategy: z.string().optional(),
  steps: z.array(z.unknown()).optional(),
});
export type TaskToml = z.infer<typeof TaskToml>;

/**
 * Parses the text of a task.toml. Unknown keys are dropped and returned as `unknown` (dotted paths);
 * deprecated ones are translated: `version`, `memory = "4G"`, `storage = "10G"`. `TaskInvalid` names
 * the line of a syntax error, or every key with a wrong value and what is expected there.
 */
export function parseTaskToml(text: string, file: string): { config: TaskToml; unknown: string[] } {
  let raw: Record<string, unknown>;
  try {
    raw = parseToml(text);
  } catch (thrown) {
    if (!(thrown instanceof TomlError)) throw thrown;
    const why = thrown.message.split('\n')[0]?.replace(/^Invalid TOML document: /, '');
    throw taskInvalid(
      file,
      `line ${thrown.line}, column ${thrown.column}`,
      `not valid TOML: ${why}`,
    );
  }
  const unknown: string[] = [];
  let result = TaskToml.safeParse(raw);
  if (!result.success) {
    for (const issue of result.error.issues) {
      if (issue.code !== 'unrecognized_keys') continue;
      for (const key of issue.keys) {
        unknown.push([...issue.path, key].join('.'));
        delete (at(raw, issue.path) as Record<string, unknown>)[key];
      }
    }
    if (unknown.length > 0) result = TaskToml.safeParse(raw);
  }
  if (!result.success) {
    const problems = result.error.issues.map((issue) => {
      const got = JSON.stringify(at(raw, issue.path));
      return `${issue.path.join('.') || '(top level)'}: ${issue.message}${got === undefined ? '' : `, got ${got.slice(0, 80)}`}`;
    });
    throw taskInvalid(file, null, problems.join('; '));
  }
  return { config: migrate(result.data, file), unknown };
}

function migrate(config: TaskToml, file: string): TaskToml {
  if (config.schema_version === undefined && config.version !== undefined) {
    const version = String(config.version);
    if (!/^1(\.\d+)*$/.test(version))
      throw taskInvalid(file, 'version', `expected version 1 of the format, got ${version}`);
    config.schema_version = version;
  }
  const environment = config.environment;
  if (environment?.memory !== undefined) environment.memory_mb ??= megabytes(environment.memory);
  if (environment?.storage !== undefined) environment.storage_mb ??= megabytes(environment.storage);
  return config;
}

/** Megabytes of a size such as "4G", at least 1. Binary units, as Docker reads them. */
function megabytes(size: string): number {
  const unit = { k: 1 / 1024, m: 1, g: 1024, t: 1024 * 1024 };
  const letter = size.replace(/[^a-zA-Z]/g, '')[0]?.toLowerCase() as keyof typeof unit;
  return Math.max(1, Math.round(Number.parseFloat(size) * unit[letter]));
}

function at(value: unknown, path: readonly PropertyKey[]): unknown {
  return path.reduce<unknown>(
    (inner, key) => (inner as Record<PropertyKey, unknown> | undefined)?.[key],
    value,
  );
}

/**
 * Expands `${NAME}` and `${NAME:-default}` in the values of a task's `env`. Only names in `allowed`
 * are ever read: a task directory comes from strangers and must not be able to ask for the user's
 * secrets. `TaskInvalid` for a name that is neither allowed nor has a default.
 */
export function expandEnv(
  env: Readonly<Record<string, string>>,
  allowed: Readonly<Record<string, string>>,
  file: string,
  section: string,
): Record<string, string> {
  const out: Record<string, string> = {};
  for (const [key, value] of Object.entries(env)) {
    out[key] = value.replace(
      /\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}/g,
      (_, name: string, fallback: string | undefined) => {
        const known = Object.hasOwn(allowed, name) ? allowed[name] : fallback;
        if (known === undefined)
          throw taskInvalid(
            file,
            `${section}.${key}`,
            `asks for the variable ${name}, which was not allowed; allow it, or write \${${name}:-default}`,
          );
        return known;
      },
    );
  }
  return out;
}
