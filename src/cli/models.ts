import type { RunSpec } from '../core/index.ts';
import type { Model } from '../model/contract.ts';
import { resolveModel } from '../model/index.ts';
import type { Platform } from './platform.ts';

/** The model a run names, closed with the platform. */
export async function openModel(platform: Platform, model: RunSpec['model']): Promise<Model> {
  const opened = await resolveModel({
    ref: model.ref,
    env: process.env,
    ...(model.baseUrl === undefined ? {} : { baseUrl: model.baseUrl }),
  });
  platform.closeLater(async () => opened.close?.());
  return opened;
}
