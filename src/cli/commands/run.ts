import { resolve } from 'node:path';
import type { RunSpec } from '../../core/index.ts';
import { harborEnvironment } from '../../env/harbor/index.ts';
import { createRun } from '../../run/index.ts';
import type { NetworkRule } from '../../sandbox/contract.ts';
import { host, openParts } from '../host.ts';
import { taskImages } from '../images.ts';
import { printable } from '../output.ts';
import type { Platform } from '../platform.ts';

export interface RunOptions {
  model: string;
  baseUrl?: string;
  seed: number;
  modelCalls: number;
  toolCalls?: number;
  minutes?: number;
  allow?: NetworkRule[];
}

/** `longhaul run TASK_DIR`: everything that can be wrong is found before the run exists. */
export async function run(
  platform: Platform,
  taskDir: string,
  options: RunOptions,
): Promise<number> {
  const model = { ref: options.model, ...(options.baseUrl ? { baseUrl: options.baseUrl } : {}) };
  const ref = {
    environment: 'harbor',
    id: resolve(taskDir),
    domain: 'coding',
    split: 'heldout' as const,
    ...(options.allow && { allow: options.allow }),
  };
  const session = await harborEnvironment(taskImages(platform)).open(ref);
  for (const note of session.task.notes) platform.output.say(`note   ${printable(note)}`);
  const spec: RunSpec = {
    kind: 'hosted',
    task: { name: session.name, ref: JSON.stringify(ref), hash: session.hash },
    agent: 'coder',
    model,
    seed: options.seed,
    budget: {
      modelCalls: options.modelCalls,
      ...(options.toolCalls ? { toolCalls: options.toolCalls } : {}),
      wallMs: options.minutes
        ? options.minutes * 60_000
        : (session.task.agentTimeoutMs ?? undefined),
    },
  };
  await openParts(platform, spec);
  const store = await platform.store();
  const runId = await createRun(store.log, spec);
  platform.output.say(`run ${runId}: ${session.name} by ${options.model}`);
  return host(platform, runId, spec);
}
