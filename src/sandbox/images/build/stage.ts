import type { LayerId } from '../../contract.ts';
import { EMPTY_CONFIG, type ImageConfig, sha256 } from '../record.ts';
import type { Variables } from './words.ts';

/** An image in the making: what lies in it, and what its next instruction sees. */
export interface Stage {
  /** Identifies everything that led here; equal keys have equal content. */
  key: string;
  layer: LayerId | null;
  host: boolean;
  config: ImageConfig;
  /** ARG variables declared so far. ENV of the same name wins. */
  args: Record<string, string>;
  shell: string[];
  history: string[];
}

export const DEFAULT_SHELL = ['/bin/sh', '-c'];

export function emptyStage(host: boolean): Stage {
  return {
    key: sha256(host ? 'host' : 'scratch'),
    layer: null,
    host,
    config: structuredClone(EMPTY_CONFIG),
    args: {},
    shell: DEFAULT_SHELL,
    history: [],
  };
}

export function variables(stage: Stage): Variables {
  return { ...stage.args, ...stage.config.env };
}

/** The key of what `details` makes of a stage. */
export function nextKey(stage: Stage, details: readonly unknown[]): string {
  return sha256(JSON.stringify([1, stage.key, ...details]));
}
